// Random values of distributions that follow from uniform or normal ones, which every rank draws
// for its own elements: the values of one rank for any rank count.

#include <cmath>

#include <ATen/ATen.h>

#include "shardfield/dispatch/op_table.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using MaybeGenerator = std::optional<at::Generator>;

/// Uniform in [0, 1) in double, shaped as x.
Tensor uniform_like(const Tensor& x, const MaybeGenerator& generator) {
  return at::empty_like(x, x.options().device(x.device()).dtype(at::kDouble))
      .uniform_(0, 1, generator);
}

Tensor& cauchy_(Tensor& x, double median, double sigma, MaybeGenerator generator) {
  TORCH_CHECK(sigma > 0.0, "cauchy_ expects sigma > 0.0, but found sigma=", sigma);
  return x.copy_((uniform_like(x, generator) - 0.5).mul_(M_PI).tan_().mul_(sigma).add_(median));
}

Tensor& geometric_(Tensor& x, double p, MaybeGenerator generator) {
  TORCH_CHECK(0 < p && p < 1, "geometric_ expects p to be in (0, 1), but got p=", p);
  const Tensor above_zero = uniform_like(x, generator).neg_().add_(1);
  return x.copy_(above_zero.log_().div_(std::log1p(-p)).ceil_().clamp_min_(1));
}

Tensor& log_normal_(Tensor& x, double mean, double std, MaybeGenerator generator) {
  TORCH_CHECK(std > 0.0, "log_normal_ expects std > 0.0, but found std=", std);
  return x.normal_(mean, std, generator).exp_();
}

Tensor normal_tensor_float(const Tensor& mean, double std, MaybeGenerator generator) {
  return at::empty_like(mean).normal_(0, std, generator).add_(mean);
}
Tensor normal_float_tensor(double mean, const Tensor& std, MaybeGenerator generator) {
  return at::empty_like(std).normal_(0, 1, generator).mul_(std).add_(mean);
}
Tensor normal_tensor_tensor(const Tensor& mean, const Tensor& std, MaybeGenerator generator) {
  return at::empty_like(mean + std).normal_(0, 1, generator).mul_(std).add_(mean);
}

}  // namespace

SHARDFIELD_OPS(distributions) {
  table.backend("aten::cauchy_", TORCH_FN(cauchy_));
  table.backend("aten::geometric_", TORCH_FN(geometric_));
  table.backend("aten::log_normal_", TORCH_FN(log_normal_));
  table.backend("aten::normal.Tensor_float", TORCH_FN(normal_tensor_float));
  table.backend("aten::normal.float_Tensor", TORCH_FN(normal_float_tensor));
  table.backend("aten::normal.Tensor_Tensor", TORCH_FN(normal_tensor_tensor));
}

}  // namespace shardfield::ops
