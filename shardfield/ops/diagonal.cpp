// Diagonals. Where one of the two dims is cut every rank holds a run of the diagonal, so it is a
// true view; where both are cut the second is made whole first.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/dispatch/reshard_gradient.h"
#include "shardfield/ops/slice_origin.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::layout_of;
using tensor::piece_of;

/// Elements (i, i + offset) of dims (dim1, dim2), rows [begin, begin + size) of dim1.
struct Diagonal {
  int64_t offset, dim1, dim2;
  int64_t begin = 0, size = 0;

  Diagonal(at::IntArrayRef sizes, int64_t offset, int64_t d1, int64_t d2)
      : offset(offset),
        dim1(at::maybe_wrap_dim(d1, static_cast<int64_t>(sizes.size()))),
        dim2(at::maybe_wrap_dim(d2, static_cast<int64_t>(sizes.size()))) {
    TORCH_CHECK(dim1 != dim2, "diagonal dimensions cannot be identical ", d1, ", ", d2);
    begin = std::max<int64_t>(0, -offset);
    size = std::max<int64_t>(0, std::min(sizes[dim1], sizes[dim2] - offset) - begin);
  }
  /// Row of dim1 or column of dim2 where a piece starts -> first own position on the diagonal.
  int64_t position(int64_t dim, int64_t start) const {
    const int64_t row = dim == dim1 ? start : start - offset;
    return std::clamp<int64_t>(row - begin, 0, size);
  }
  bool has(int64_t dim) const { return dim == dim1 || dim == dim2; }
  /// Where a dim goes in the result; dims of the diagonal go to its end.
  int target(int64_t dim, int64_t ndim) const {
    if (has(dim)) return static_cast<int>(ndim - 2);
    return static_cast<int>(dim - (dim > dim1) - (dim > dim2));
  }
};

std::vector<int64_t> positions_per_piece(const Cut& cut, const Diagonal& d) {
  std::vector<int64_t> sizes;
  int64_t start = 0;
  for (int64_t s : cut.sizes) {
    sizes.push_back(d.position(cut.dim, start + s) - d.position(cut.dim, start));
    start += s;
  }
  return sizes;
}

/// x with at most one cut on the two dims, and that a simple one; never whole, so that a copy can
/// be told from a view. Differentiable.
Tensor one_cut_on(const Tensor& x, const Diagonal& d) {
  const Layout& layout = layout_of(x);
  std::vector<Cut> kept;
  bool taken = false;
  for (const Cut& cut : layout.cuts()) {
    if (d.has(cut.dim)) {
      if (cut.total() != x.size(cut.dim)) return one_cut_on(with_simple_cuts(x), d);
      if (taken) continue;
      taken = true;
    }
    kept.push_back(cut);
  }
  if (kept.size() == layout.cuts().size()) return x;
  return tensor::redistribute(x, spec::intern_layout(layout.mesh(), std::move(kept)));
}

Tensor diagonal_of(const Tensor& x, const Diagonal& d) {
  const Layout& layout = layout_of(x);
  std::vector<Cut> cuts;
  int64_t local_offset = d.offset;
  for (size_t c = 0; c < layout.cuts().size(); ++c) {
    Cut cut = layout.cuts()[c];
    if (d.has(cut.dim)) {
      const int64_t start = layout.local_offset(c);
      local_offset += cut.dim == d.dim1 ? start : -start;
      cut.sizes = positions_per_piece(cut, d);
    }
    cut.dim = d.target(cut.dim, x.dim());
    cuts.push_back(std::move(cut));
  }
  const Layout* out = spec::intern_layout(layout.mesh(), std::move(cuts));
  const Tensor outer = at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta))
                           .diagonal(d.offset, d.dim1, d.dim2);
  return tensor::make_view(piece_of(x).diagonal(local_offset, d.dim1, d.dim2), out, outer.sizes(),
                           outer.strides(), x.storage_offset() + outer.storage_offset(), x);
}

Tensor moved_diagonal(const Tensor& fit, const Diagonal& d) {
  return tensor::as_moved_view(fit).diagonal(d.offset, d.dim1, d.dim2);
}

Tensor diagonal_kernel(const Tensor& x, int64_t offset, int64_t dim1, int64_t dim2) {
  const Diagonal d(x.sizes(), offset, dim1, dim2);
  const Tensor fit = one_cut_on(x, d);
  return fit.is_same(x) ? diagonal_of(x, d) : moved_diagonal(fit, d);
}

Tensor diagonal_above(c10::DispatchKeySet keys, const Tensor& x, int64_t offset, int64_t dim1,
                      int64_t dim2) {
  const Diagonal d(x.sizes(), offset, dim1, dim2);
  const Tensor fit = one_cut_on(x, d);
  if (!fit.is_same(x)) return moved_diagonal(fit, d);
  Tensor v = dispatch::call_view_formula<at::_ops::diagonal>(keys, x, offset, dim1, dim2);
  dispatch::reshard_gradient(v, x);
  return v;
}

/// Zeros with the gradient on their diagonal, rows of dim1 cut where the diagonal is.
Tensor diagonal_backward_kernel(const Tensor& grad, c10::SymIntArrayRef size, int64_t offset,
                                int64_t dim1, int64_t dim2) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto ndim = static_cast<int64_t>(sizes.size());
  const Diagonal d(sizes, offset, dim1, dim2);
  std::vector<Cut> cuts = layout_of(grad).cuts();
  for (Cut& cut : cuts) {
    int64_t source = d.dim1;
    for (int64_t s = 0; s < ndim; ++s)
      if (!d.has(s) && d.target(s, ndim) == cut.dim) source = s;
    cut.dim = static_cast<int>(source);
  }
  const Layout* along_rows = spec::intern_layout(layout_of(grad).mesh(), std::move(cuts));
  const Layout* whole = along_rows->is_cut(static_cast<int>(d.dim1))
                            ? slice_origin(along_rows, sizes, d.dim1, d.begin, 1)
                            : along_rows;
  Tensor out = tensor::make_sharded(
      at::zeros(tensor::piece_sizes(*whole, sizes), piece_of(grad).options()), whole, sizes);
  if (grad.numel() > 0) diagonal_of(out, d).copy_(grad);
  return out;
}

Tensor diagonal_scatter(const Tensor& x, const Tensor& source, int64_t offset, int64_t dim1,
                        int64_t dim2) {
  if (!tensor::is_sharded(x))
    return at::diagonal_scatter(x, tensor::gather(source), offset, dim1, dim2);
  const Diagonal d(x.sizes(), offset, dim1, dim2);
  const Tensor fit = one_cut_on(x, d);
  Tensor out = fit.clone();
  Tensor part = out.diagonal(offset, dim1, dim2);
  TORCH_CHECK(part.sizes() == source.sizes(),
              "expected src to have a size equal to the slice of self. src size = ", source.sizes(),
              ", slice size = ", part.sizes());
  part.copy_(source);
  return tensor::redistribute(out, &layout_of(x));
}

Tensor diag_embed(const Tensor& x, int64_t offset, int64_t dim1, int64_t dim2) {
  const int64_t ndim = x.dim() + 1;
  const int64_t d1 = dim1 < 0 ? dim1 + ndim : dim1, d2 = dim2 < 0 ? dim2 + ndim : dim2;
  TORCH_CHECK(d1 != d2, "diagonal dimensions cannot be identical ", dim1, ", ", dim2);
  const int64_t n = x.size(-1) + std::abs(offset);
  // Row i of the matrices holds element i of x: column i + offset.
  const Tensor columns = at::arange(n, x.options().device(x.device()).dtype(at::kLong));
  const Tensor rows = at::arange(x.size(-1), columns.options()) + std::max<int64_t>(offset, 0);
  const Tensor mask = columns.unsqueeze(0) == rows.unsqueeze(1);
  Tensor matrices = at::where(mask, x.unsqueeze(-1), at::zeros({}, x.options().device(x.device())));
  if (offset != 0) {
    std::vector<int64_t> pad{0, 0, std::max<int64_t>(-offset, 0), std::max<int64_t>(offset, 0)};
    matrices = at::constant_pad_nd(matrices, pad, 0);
  }
  return matrices.movedim({-2, -1}, {d1, d2});
}

Tensor trace(const Tensor& x) {
  TORCH_CHECK(x.dim() == 2, "trace: expected a matrix, but got tensor with dim ", x.dim());
  return x.diagonal().sum();
}

}  // namespace

SHARDFIELD_OPS(diagonal) {
  table.above_autograd("aten::diagonal", TORCH_FN(diagonal_above));
  table.view("aten::diagonal", TORCH_FN(diagonal_kernel));
  table.backend("aten::diagonal_backward", TORCH_FN(diagonal_backward_kernel));
  table.composed("aten::diagonal_scatter", TORCH_FN(diagonal_scatter));
  table.composed("aten::diag_embed", TORCH_FN(diag_embed));
  table.composed("aten::trace", TORCH_FN(trace));
}

}  // namespace shardfield::ops
