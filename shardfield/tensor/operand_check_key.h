#pragma once

#include <c10/core/DispatchKey.h>

namespace shardfield::tensor {

/// Carried by sharded tensors that are made at check level full; it brings their ops to
/// dispatch/operand_check.cpp first. PyTorch keeps the key for code outside of it, above autograd
/// and autocast; torchdistx, which is no longer developed, was its one user.
inline constexpr c10::DispatchKey kOperandCheckKey = c10::DispatchKey::DeferredInit;

}  // namespace shardfield::tensor
