// Sums, means and extrema. A reduction over a cut dim is local, then one all-reduce; its result is
// plain along that dim. Weighted by real counts, so uneven and empty pieces are exact.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/moments.h"
#include "shardfield/ops/reduced_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::OptionalIntArrayRef;
using at::Tensor;
using tensor::local;

using Dtype = std::optional<at::ScalarType>;

bool is_reduced_precision(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16;
}

Tensor sum_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, Dtype dtype) {
  const ReducedDims r(x, dims, keepdim);
  const auto type = dtype.value_or(x.scalar_type());
  if (r.crosses_ranks() && is_reduced_precision(type)) {
    // One device accumulates in float and rounds once.
    return r.finish_sum(at::sum(local(x), r.dims, keepdim, at::kFloat)).to(type);
  }
  return r.finish_sum(at::sum(local(x), r.dims, keepdim, dtype));
}
Tensor sum(const Tensor& x, Dtype dtype) {
  if (tensor::layout_of(x).is_alone()) return at::sum(local(x), dtype);
  return sum_dims(x, std::nullopt, false, dtype);
}

Tensor mean_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, Dtype dtype) {
  const auto type = dtype.value_or(x.scalar_type());
  SHARDFIELD_CHECK(at::isFloatingType(type) || at::isComplexType(type), "mean",
                   "expected a floating or complex dtype, got ", type, "; pass dtype=");
  const ReducedDims r(x, dims, keepdim);
  int64_t count = 1;
  for (int64_t d : r.dims) count *= x.size(d);
  if (is_reduced_precision(type)) {
    return (sum_dims(x, dims, keepdim, at::kFloat) / count).to(type);
  }
  return sum_dims(x, dims, keepdim, dtype) / count;
}
Tensor mean(const Tensor& x, Dtype dtype) {
  if (tensor::layout_of(x).is_alone()) return at::mean(local(x), dtype);
  return mean_dims(x, std::nullopt, false, dtype);
}

Tensor nansum_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, Dtype dtype) {
  const ReducedDims r(x, dims, keepdim);
  return r.finish_sum(at::nansum(local(x), r.dims, keepdim, dtype));
}

Tensor count_nonzero_dims(const Tensor& x, at::IntArrayRef dims) {
  return sum_dims(x.ne(0), dims, false, at::kLong);
}
Tensor count_nonzero_dim(const Tensor& x, std::optional<int64_t> dim) {
  return dim ? count_nonzero_dims(x, *dim) : count_nonzero_dims(x, {});
}

/// Every rank's partial product side by side, then one product: its derivative stands zeros.
Tensor prod_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, Dtype dtype) {
  const ReducedDims r(x, dims, keepdim);
  Tensor piece = local(x);
  if (dims.has_value()) {
    piece = at::prod(piece, r.dims[0], keepdim, dtype);
  } else {
    piece = at::prod(piece, dtype);
  }
  return r.finish(r.crosses_ranks() ? at::prod(r.stack_partials(piece), 0) : piece);
}
Tensor prod_all(const Tensor& x, Dtype dtype) {
  return prod_dims(x, std::nullopt, false, dtype);
}
Tensor prod_dim(const Tensor& x, int64_t dim, bool keepdim, Dtype dtype) {
  return prod_dims(x, at::OptionalIntArrayRef(dim), keepdim, dtype);
}

// any and all.

Tensor truth(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, bool any) {
  const ReducedDims r(x, dims, keepdim);
  const Tensor piece = tensor::piece_of(x);
  const Tensor part = any ? at::any(piece, r.dims, keepdim) : at::all(piece, r.dims, keepdim);
  return r.finish(r.combine(part, any ? comm::Reduction::kMax : comm::Reduction::kMin));
}
Tensor any_all(const Tensor& x) {
  return truth(x, std::nullopt, false, true);
}
Tensor any_dim(const Tensor& x, int64_t dim, bool keepdim) {
  return truth(x, at::IntArrayRef(dim), keepdim, true);
}
Tensor any_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim) {
  return truth(x, dims, keepdim, true);
}
Tensor all_all(const Tensor& x) {
  return truth(x, std::nullopt, false, false);
}
Tensor all_dim(const Tensor& x, int64_t dim, bool keepdim) {
  return truth(x, at::IntArrayRef(dim), keepdim, false);
}
Tensor all_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim) {
  return truth(x, dims, keepdim, false);
}

/// The same answer on every rank.
bool equal_everywhere(const Tensor& a, const Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  const spec::Layout& layout = tensor::layout_of(tensor::is_sharded(a) ? a : b);
  const at::NoGradGuard no_grad;
  const bool same =
      at::equal(tensor::piece_for(a, layout, a.sizes()), tensor::piece_for(b, layout, a.sizes()));
  const Tensor flag = at::scalar_tensor(same, at::TensorOptions(a.device()).dtype(at::kByte));
  return comm::all_reduce(flag, layout.mesh(), layout.axes(), comm::Reduction::kMin).item<bool>();
}

at::Scalar only_value(const Tensor& x) {
  SHARDFIELD_CHECK(x.numel() == 1, "item", "expected a tensor of one element, got ",
                   tensor::describe(x));
  return tensor::gather(x).item();
}

}  // namespace

SHARDFIELD_OPS(reduction) {
  table.composed("aten::nansum", TORCH_FN(nansum_dims));
  table.composed("aten::count_nonzero", TORCH_FN(count_nonzero_dim));
  table.composed("aten::count_nonzero.dim_IntList", TORCH_FN(count_nonzero_dims));
  table.composed("aten::prod", TORCH_FN(prod_all));
  table.composed("aten::prod.dim_int", TORCH_FN(prod_dim));
  table.composed("aten::any", TORCH_FN(any_all));
  table.composed("aten::any.dim", TORCH_FN(any_dim));
  table.composed("aten::any.dims", TORCH_FN(any_dims));
  table.composed("aten::all", TORCH_FN(all_all));
  table.composed("aten::all.dim", TORCH_FN(all_dim));
  table.composed("aten::all.dims", TORCH_FN(all_dims));
  table.composed("aten::equal", TORCH_FN(equal_everywhere));
  table.composed("aten::_local_scalar_dense", TORCH_FN(only_value));
  table.composed("aten::sum", TORCH_FN(sum));
  table.composed("aten::sum.dim_IntList", TORCH_FN(sum_dims));
  table.composed("aten::mean", TORCH_FN(mean));
  table.composed("aten::mean.dim", TORCH_FN(mean_dims));
}

}  // namespace shardfield::ops
