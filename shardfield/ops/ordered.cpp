// Ops that order one dim: sort, topk, medians. Along a whole dim every rank works on its own piece.
// A cut dim is made whole by moving the cut to another dim, and the result is cut as the input was;
// of a vector, which has no other dim, the ranks sort together. The k largest are taken among every
// rank's own k largest.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/reduced_dims.h"
#include "shardfield/ops/sample_sort.h"
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

  /// @param is_small  a vector may be gathered: what is left of it is of the result's size
  Along(const char* op, const Tensor& given, int64_t dim_arg, bool is_small = false)
      : input(with_simple_cuts(given)), dim(at::maybe_wrap_dim(dim_arg, given.dim())) {
    x = is_small && input.dim() == 1 ? tensor::gather(input) : with_whole_dim(op, input, dim);
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

bool is_cut_vector(const Tensor& x) {
  return is_sharded(x) && x.dim() == 1;
}

Pair sort_vector(const Tensor& given, int64_t dim, bool descending) {
  at::maybe_wrap_dim(dim, 1);
  const Tensor x = with_simple_cuts(given);
  const SortedVector sorted = sample_sort(x, descending);
  return {tensor::redistribute(sorted.values, &layout_of(x)),
          tensor::redistribute(sorted.indices, &layout_of(x))};
}

Pair sort_along(const Tensor& x, int64_t dim, bool descending) {
  if (is_cut_vector(x)) return sort_vector(x, dim, descending);
  const Along a("sort", x, dim);
  return a.finish(at::sort(a.piece, a.dim, descending));
}
Pair sort_stable_along(const Tensor& x, std::optional<bool> stable, int64_t dim, bool descending) {
  if (is_cut_vector(x)) return sort_vector(x, dim, descending);
  const Along a("sort", x, dim);
  return a.finish(at::sort(a.piece, stable, a.dim, descending));
}
Tensor argsort_stable_along(const Tensor& x, bool stable, int64_t dim, bool descending) {
  if (is_cut_vector(x)) return std::get<1>(sort_vector(x.detach(), dim, descending));
  const Along a("argsort", x, dim);
  return a.finish(at::argsort(a.piece, stable, a.dim, descending));
}

/// Every rank's own k best along a cut dim: the k best of all are among them.
Pair own_topk(const Tensor& x, int64_t k, int64_t dim, bool largest) {
  const Layout& layout = layout_of(x);
  const int c = layout.cut_on(static_cast<int>(dim));
  std::vector<spec::Cut> cuts = layout.cuts();
  for (int64_t& n : cuts[c].sizes) n = std::min(n, k);
  auto [values, indices] =
      at::topk(tensor::local(x), std::min(layout.local_size(c), k), dim, largest);
  auto sizes = x.sizes().vec();
  sizes[dim] = cuts[c].total();
  const int64_t offset = layout.local_offset(c);
  const Layout* candidates = spec::intern_layout(layout.mesh(), std::move(cuts));
  return {tensor::wrap(values, candidates, sizes),
          tensor::make_sharded(indices + offset, candidates, sizes)};
}

Pair topk_along(const Tensor& given, c10::SymInt sym_k, int64_t dim, bool largest, bool sorted) {
  const int64_t k = sym_k.expect_int();
  dim = at::maybe_wrap_dim(dim, given.dim());
  SHARDFIELD_CHECK(k >= 0 && k <= (given.dim() > 0 ? given.size(dim) : 1), "topk",
                   "selected index k out of range: expected 0 to the size of dim ", dim, ", got ",
                   k, " for ", tensor::describe(given));
  const Tensor x = with_simple_cuts(given);
  if (!is_sharded(x) || !layout_of(x).is_cut(static_cast<int>(dim))) {
    const Along a("topk", x, dim);
    return a.finish(at::topk(a.piece, k, a.dim, largest, sorted));
  }
  const auto [values, indices] = own_topk(x, k, dim, largest);
  const Along v("topk", values, dim, true), i("topk", indices, dim, true);
  const auto [best, place] = at::topk(v.piece, k, dim, largest, sorted);
  return {v.finish(best), i.finish(at::gather(i.piece, dim, place))};
}

/// Element k (from 0) of a cut vector in ascending order, and its index; plain.
Pair kth_of_vector(const Tensor& given, int64_t k, bool keepdim) {
  const Tensor x = with_simple_cuts(given);
  const Tensor order = sample_sort(x.detach(), false).indices;
  const Tensor index = tensor::gather(order.narrow(0, k, 1));
  const Tensor value = tensor::gather(x.index_select(0, index));
  return keepdim ? Pair(value, index) : Pair(value.squeeze(0), index.squeeze(0));
}

Pair kthvalue_along(const Tensor& x, c10::SymInt sym_k, int64_t dim, bool keepdim) {
  if (is_cut_vector(x)) {
    const int64_t k = sym_k.expect_int();
    at::maybe_wrap_dim(dim, 1);
    SHARDFIELD_CHECK(k >= 1 && k <= x.numel(), "kthvalue", "selected number k out of range: got ",
                     k, " for ", tensor::describe(x), "; give 1 to the size of dim 0");
    return kth_of_vector(x, k - 1, keepdim);
  }
  const Along a("kthvalue", x, dim);
  return a.finish(at::kthvalue_symint(a.piece, sym_k, a.dim, keepdim), !keepdim);
}

/// Place of the median in ascending order: among the numbers, or the first NaN if there is one.
int64_t median_place(const Tensor& x, bool ignores_nan) {
  const int64_t n = x.numel();
  const int64_t nan = at::isFloatingType(x.scalar_type()) ? x.isnan().sum().item<int64_t>() : 0;
  if (nan > 0 && !ignores_nan) return n - nan;
  return std::max<int64_t>(n - nan - 1, 0) / 2;
}

/// The elements of x as a vector, each rank's own in its own order.
Tensor as_vector(const Tensor& x) {
  const Layout& layout = layout_of(x);
  spec::Cut cut{0, {}, {}};
  int64_t pieces = 1;
  for (const spec::Cut& c : layout.cuts()) {
    cut.axes.insert(cut.axes.end(), c.axes.begin(), c.axes.end());
    pieces *= static_cast<int64_t>(c.sizes.size());
  }
  cut.sizes.resize(pieces);
  const spec::Mesh& mesh = layout.mesh();
  for (int r = 0; r < mesh.size(); ++r) {
    const auto coord = mesh.coord_of(r);
    cut.sizes[cut.piece_at(mesh, coord)] = c10::multiply_integers(
        layout.local_sizes_at(x.sizes().data(), static_cast<int>(x.dim()), coord));
  }
  return tensor::make_sharded(tensor::piece_of(x).reshape(-1), spec::intern_layout(mesh, {cut}),
                              x.numel());
}

/// The gradient of a median is shared evenly among the elements equal to it.
Tensor median_of_all(const Tensor& x, bool ignores_nan) {
  if (x.numel() == 0) return at::median(at::empty({0}, tensor::piece_of(x).options()));
  const Tensor detached = x.detach();
  Tensor value =
      std::get<0>(kth_of_vector(as_vector(detached), median_place(detached, ignores_nan), false));
  if (!tensor::records_grad(x)) return value;
  Tensor same = detached.eq(value);
  if (at::isFloatingType(x.scalar_type())) same = same.logical_or(detached.isnan() & value.isnan());
  const Tensor weight = same.to(x.scalar_type()) / same.sum();
  return ReducedDims(x, std::nullopt, false).pick(tensor::local(x), tensor::local(weight), value);
}
Tensor median_all(const Tensor& x) {
  return median_of_all(x, false);
}
Tensor nanmedian_all(const Tensor& x) {
  return median_of_all(x, true);
}

Pair median_along(const Tensor& x, int64_t dim, bool keepdim) {
  if (is_cut_vector(x) && x.numel() > 0)
    return kth_of_vector(x, median_place(x.detach(), false), keepdim);
  const Along a("median", x, dim);
  return a.finish(at::median(a.piece, a.dim, keepdim), !keepdim);
}
Pair nanmedian_along(const Tensor& x, int64_t dim, bool keepdim) {
  if (is_cut_vector(x) && x.numel() > 0)
    return kth_of_vector(x, median_place(x.detach(), true), keepdim);
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
  table.composed("aten::median", TORCH_FN(median_all));
  table.composed("aten::nanmedian", TORCH_FN(nanmedian_all));
  table.composed("aten::median.dim", TORCH_FN(median_along));
  table.composed("aten::nanmedian.dim", TORCH_FN(nanmedian_along));
  table.composed("aten::mode", TORCH_FN(mode_along));
}

}  // namespace shardfield::ops
