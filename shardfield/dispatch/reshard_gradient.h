#pragma once

#include <ATen/core/Tensor.h>

namespace shardfield::dispatch {

/// Puts a node between `result`'s derivative formula and `source` that cuts the gradient like
/// `source`: formulas that know sizes only (select, diagonal, unfold) make plain ones. Local; the
/// gradient's values do not change.
void reshard_gradient(const at::Tensor& result, const at::Tensor& source);

}  // namespace shardfield::dispatch
