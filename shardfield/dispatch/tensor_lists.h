#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace shardfield::dispatch {

/// True for ops that do one thing to each entry of lists of tensors: _foreach_*, fused optimizers.
bool is_list_op(const std::string& name);

/// At PrivateUse3: the op once over all pieces. Entry k of every list is brought to the layout of
/// the written (else the first sharded) entry k; plain entries stay as they are. Local, apart from
/// entries that are cut otherwise.
void list_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// At AutogradPrivateUse3 above list_kernel: PyTorch's own formula.
void formula_of_lists(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                      torch::jit::Stack* stack);

}  // namespace shardfield::dispatch
