// Ops that order one dim: sort, topk, medians. Along a whole dim
// every rank works on its own piece. A cut dim is made whole by moving the cut to another dim, and
// the result is cut as the input was.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using Pair = std::tuple<Tensor, Tensor>;

/// Result of `run` on the pieces, laid out as x is except along `dim`, whose length may change.
/// With `drops` the dim is gone.
template <class F>
Tensor laid_out(const Tensor& piece, const Tensor& x, const Tensor& input, int64_t dim, bool drops,
                F&& full_size) {
  std::vector<int64_t> sizes = x.sizes().vec();
  std::vector<int> new_dim(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d)
    new_dim[d] = static_cast<int>(!drops || d < dim ? d : d - 1);
  if (drops) {
    new_dim[dim] = -1;
    sizes.erase(sizes.begin() + dim);
  } else {
    sizes[dim] = full_size(x.size(dim));
  }
  const Layout* layout = is_sharded(x) ? spec::renumber(layout_of(x), new_dim) : nullptr;
  const Tensor out = tensor::wrap(piece, layout, sizes);
  return out.sizes() == input.sizes() ? tensor::redistribute(out, &layout_of(input)) : out;
}

struct Along {
  Tensor input, x, piece;
  int64_t dim;

  Along(const char* op, const Tensor& given, int64_t dim_arg)
      : input(with_simple_cuts(given)), dim(at::maybe_wrap_dim(dim_arg, given.dim())) {
    x = with_whole_dim(op, input, dim);
    piece = is_sharded(x) ? tensor::local(x) : x;
  }
  Tensor finish(const Tensor& result, bool drops = false) const {
    if (!is_sharded(input)) return result;
    const int64_t length = drops ? 0 : result.size(dim);
    return laid_out(result, x, input, dim, drops, [&](int64_t) { return length; });
  }
  Pair finish(const Pair& result, bool drops = false) const {
    return {finish(std::get<0>(result), drops), finish(std::get<1>(result), drops)};
  }
};

Pair sort_along(const Tensor& x, int64_t dim, bool descending) {
  const Along a("sort", x, dim);
  return a.finish(at::sort(a.piece, a.dim, descending));
}
Pair sort_stable_along(const Tensor& x, std::optional<bool> stable, int64_t dim, bool descending) {
  const Along a("sort", x, dim);
  return a.finish(at::sort(a.piece, stable, a.dim, descending));
}
Tensor argsort_stable_along(const Tensor& x, bool stable, int64_t dim, bool descending) {
  const Along a("argsort", x, dim);
  return a.finish(at::argsort(a.piece, stable, a.dim, descending));
}
Pair topk_along(const Tensor& x, c10::SymInt k, int64_t dim, bool largest, bool sorted) {
  const Along a("topk", x, dim);
  return a.finish(at::topk_symint(a.piece, k, a.dim, largest, sorted));
}
Pair kthvalue_along(const Tensor& x, c10::SymInt k, int64_t dim, bool keepdim) {
  const Along a("kthvalue", x, dim);
  return a.finish(at::kthvalue_symint(a.piece, k, a.dim, keepdim), !keepdim);
}
Pair median_along(const Tensor& x, int64_t dim, bool keepdim) {
  const Along a("median", x, dim);
  return a.finish(at::median(a.piece, a.dim, keepdim), !keepdim);
}
Pair nanmedian_along(const Tensor& x, int64_t dim, bool keepdim) {
  const Along a("nanmedian", x, dim);
  return a.finish(at::nanmedian(a.piece, a.dim, keepdim), !keepdim);
}
Pair mode_along(const Tensor& x, int64_t dim, bool keepdim) {
  const Along a("mode", x, dim);
  return a.finish(at::mode(a.piece, a.dim, keepdim), !keepdim);
}

}  // namespace

SHARDFIELD_OPS(ordered) {
  table.composed("aten::sort", TORCH_FN(sort_along));
  table.composed("aten::sort.stable", TORCH_FN(sort_stable_along));
  table.composed("aten::argsort.stable", TORCH_FN(argsort_stable_along));
  table.composed("aten::topk", TORCH_FN(topk_along));
  table.composed("aten::kthvalue", TORCH_FN(kthvalue_along));
  table.composed("aten::median.dim", TORCH_FN(median_along));
  table.composed("aten::nanmedian.dim", TORCH_FN(nanmedian_along));
  table.composed("aten::mode", TORCH_FN(mode_along));
}

}  // namespace shardfield::ops
