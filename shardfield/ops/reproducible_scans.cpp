// Cumulative ops in reproducible mode. Running sums are exact. Products and logarithms of sums have
// no exact form: each line is scanned whole, from its first element to its last, on one rank.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/ops/exact_sums.h"
#include "shardfield/ops/reproducible_form.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using Dtype = std::optional<at::ScalarType>;

Tensor cumsum(const Tensor& x, int64_t dim, Dtype dtype) {
  const auto type =
      dtype.value_or(at::isIntegralType(x.scalar_type(), true) ? at::kLong : x.scalar_type());
  return exact_sum(x.to(type), x.size(dim),
                   [&](const Tensor& part) { return at::cumsum(part, dim); });
}

/// f(x) with `dim` of x whole, cut as x is.
template <class F>
Tensor scanned_whole(const char* op, const Tensor& x, int64_t dim, F f) {
  const dispatch::OrdinaryArithmetic ordinary;
  const Tensor whole = with_whole_dim(op, with_simple_cuts(x), at::maybe_wrap_dim(dim, x.dim()));
  return tensor::redistribute(f(whole), &tensor::layout_of(x));
}
/// PyTorch's derivative, on the pieces, multiplies, divides and adds along the line.
Tensor cumprod(const Tensor& x, int64_t dim, Dtype dtype) {
  return scanned_whole("cumprod", x, dim,
                       [&](const Tensor& t) { return at::cumprod(t, dim, dtype); });
}
Tensor logcumsumexp(const Tensor& x, int64_t dim) {
  return scanned_whole("logcumsumexp", x, dim,
                       [&](const Tensor& t) { return at::logcumsumexp(t, dim); });
}

}  // namespace

SHARDFIELD_OPS(reproducible_scans) {
  table.reproducible_composed("aten::cumsum",
                              TORCH_FN((UnderFormula<at::_ops::cumsum, &cumsum>::run)));
  table.reproducible_composed("aten::cumprod", TORCH_FN(cumprod));
  table.reproducible_composed("aten::logcumsumexp",
                              TORCH_FN((UnderFormula<at::_ops::logcumsumexp, &logcumsumexp>::run)));
}

}  // namespace shardfield::ops
