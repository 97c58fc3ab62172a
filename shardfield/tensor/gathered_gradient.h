#pragma once

#include "shardfield/comm/gradient_law.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::tensor {

/// A gradient as the whole tensor on every rank. One that was cut is gathered, and remembered as
/// summed over its axes, so that a second sum over them is noticed. Differentiable. Collective when
/// there is anything to gather.
inline at::Tensor gathered_gradient(const at::Tensor& grad) {
  if (!grad.defined() || !is_sharded(grad)) return grad;
  at::Tensor whole = gather(grad);
  const spec::Layout& layout = layout_of(grad);
  comm::remember_gradient_sum(whole, layout.mesh(), layout.axes());
  return whole;
}

}  // namespace shardfield::tensor
