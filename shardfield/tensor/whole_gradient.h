#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace shardfield::tensor {

/// The tensor itself; a sharded gradient that comes back for it is gathered, so that a plain
/// parameter's gradient is plain. For PyTorch's derivative formulas that see the parameter beside a
/// tensor cut along the parameter's own dims. Local; backward is collective when there is anything
/// to gather. Any order of derivative.
at::Tensor with_whole_gradient(const at::Tensor& plain);
std::optional<at::Tensor> with_whole_gradient(const std::optional<at::Tensor>& plain);

/// The tensor itself, plain or sharded; its gradient comes back of the same kind and layout,
/// gathered or cut where a formula made another one. Local; backward is collective where it has to
/// move anything. Any order of derivative.
at::Tensor with_own_gradient(const at::Tensor& t);

}  // namespace shardfield::tensor
