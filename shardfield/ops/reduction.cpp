// Sums, means and extrema. A reduction over a cut dim is local, then one all-reduce; its result is
// plain along that dim. Weighted by real counts, so uneven and empty pieces are exact.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/reduced_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::OptionalIntArrayRef;
using at::Tensor;
using tensor::local;

using Dtype = std::optional<at::ScalarType>;

Tensor sum_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, Dtype dtype) {
  const ReducedDims r(x, dims, keepdim);
  return r.finish_sum(at::sum(local(x), r.dims, keepdim, dtype));
}
Tensor sum(const Tensor& x, Dtype dtype) {
  return sum_dims(x, std::nullopt, false, dtype);
}

Tensor mean_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, Dtype dtype) {
  const auto type = dtype.value_or(x.scalar_type());
  SHARDFIELD_CHECK(at::isFloatingType(type) || at::isComplexType(type), "mean",
                   "expected a floating or complex dtype, got ", type, "; pass dtype=");
  const ReducedDims r(x, dims, keepdim);
  int64_t count = 1;
  for (int64_t d : r.dims) count *= x.size(d);
  if (type == at::kHalf || type == at::kBFloat16) {
    // One device accumulates in float and rounds once.
    return (sum_dims(x, dims, keepdim, at::kFloat) / count).to(type);
  }
  return sum_dims(x, dims, keepdim, dtype) / count;
}
Tensor mean(const Tensor& x, Dtype dtype) {
  return mean_dims(x, std::nullopt, false, dtype);
}

}  // namespace

SHARDFIELD_OPS(reduction) {
  table.composed("aten::sum", TORCH_FN(sum));
  table.composed("aten::sum.dim_IntList", TORCH_FN(sum_dims));
  table.composed("aten::mean", TORCH_FN(mean));
  table.composed("aten::mean.dim", TORCH_FN(mean_dims));
}

}  // namespace shardfield::ops
