#pragma once

#include <ATen/core/Tensor.h>

namespace shardfield::ops {

/// Windows of `size` every `step` indices along a cut dim: each rank fetches the rows that its own
/// windows reach over its border. Holds copies of them, so it is read only (check_writable).
/// Differentiable. Collective over the cut's ranks.
/// @throws c10::Error as Tensor.unfold for sizes and steps that do not fit
at::Tensor unfold_cut_dim(const at::Tensor& x, int64_t dim, int64_t size, int64_t step);

}  // namespace shardfield::ops
