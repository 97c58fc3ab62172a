// Cumulative ops in reproducible mode. Running sums are exact. Products and logarithms of sums have
// no exact form: each line is scanned whole, from its first element to its last, on one rank; a
// product is the last of its running products.

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

Tensor with_whole_lines(const char* op, const Tensor& x, int64_t dim) {
  return with_whole_dim(op, with_simple_cuts(x), at::maybe_wrap_dim(dim, x.dim()));
}
/// f(x) with `dim` of x whole, cut as x is.
template <class F>
Tensor scanned_whole(const char* op, const Tensor& x, int64_t dim, F f) {
  const dispatch::OrdinaryArithmetic ordinary;
  return tensor::redistribute(f(with_whole_lines(op, x, dim)), &tensor::layout_of(x));
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

Tensor product_along(const Tensor& x, int64_t dim, bool keepdim, Dtype dtype) {
  const dispatch::OrdinaryArithmetic ordinary;
  if (x.dim() == 0 || x.size(dim) == 0) return at::prod(x, dim, keepdim, dtype);
  const Tensor last = at::cumprod(with_whole_lines("prod", x, dim), dim, dtype).narrow(dim, -1, 1);
  return keepdim ? last : last.squeeze(dim);
}
Tensor product_of_all(const Tensor& x, Dtype dtype) {
  Tensor product = x;
  for (int64_t d = x.dim(); d-- > 0;) product = product_along(product, d, false, dtype);
  return product;
}

}  // namespace

SHARDFIELD_OPS(reproducible_scans) {
  table.reproducible_composed("aten::cumsum",
                              TORCH_FN((UnderFormula<at::_ops::cumsum, &cumsum>::run)));
  table.reproducible_composed("aten::cumprod", TORCH_FN(cumprod));
  table.reproducible_composed("aten::prod", TORCH_FN(product_of_all));
  table.reproducible_composed("aten::prod.dim_int", TORCH_FN(product_along));
  table.reproducible_composed("aten::logcumsumexp",
                              TORCH_FN((UnderFormula<at::_ops::logcumsumexp, &logcumsumexp>::run)));
}

}  // namespace shardfield::ops
