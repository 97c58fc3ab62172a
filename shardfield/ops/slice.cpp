// Rows of a dim: select, slice, and what is made of them. Each rank keeps the rows it holds.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/dispatch/reshard_gradient.h"
#include "shardfield/ops/slice_origin.h"
#include "shardfield/ops/view_geometry.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/range.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::layout_of;
using tensor::make_view;
using tensor::piece_of;

/// Own piece sizes of [begin, end) with step of a simple cut, and where it starts in the piece.
std::vector<int64_t> sliced_sizes(const Cut& cut, int64_t begin, int64_t end, int64_t step) {
  std::vector<int64_t> sizes;
  const auto count = [&](int64_t upto) {
    return upto <= begin ? 0 : (std::min(upto, end) - begin + step - 1) / step;
  };
  int64_t offset = 0;
  for (int64_t s : cut.sizes) {
    sizes.push_back(end <= begin ? 0 : count(offset + s) - count(offset));
    offset += s;
  }
  return sizes;
}

/// The rows begin, begin + step, ... of [begin, end) in a dim.
struct SlicedRows {
  int64_t begin, end, step;
  int64_t count() const { return (end - begin + step - 1) / step; }
  int64_t last() const { return begin + (count() - 1) * step; }
};

SlicedRows sliced_rows(int64_t n, const std::optional<c10::SymInt>& start,
                       const std::optional<c10::SymInt>& end, const c10::SymInt& sym_step) {
  const int64_t step = sym_step.expect_int();
  SHARDFIELD_CHECK(step > 0, "slice", "step must be positive, got ", step);
  const auto clamp = [n](int64_t v) { return std::clamp<int64_t>(v < 0 ? v + n : v, 0, n); };
  const int64_t begin = start ? clamp(start->expect_int()) : 0;
  return {begin, std::max(begin, end ? clamp(end->expect_int()) : n), step};
}

/// A cut that does not divide its whole dim, or one of several on it.
bool is_merged(const Tensor& x, int64_t dim) {
  const Layout& layout = layout_of(x);
  const int c = layout.cut_on(static_cast<int>(dim));
  return c >= 0 && (layout.cuts()[c].total() != x.size(dim) || !layout.has_single_cuts());
}

/// Rows of one block of a merged dim, and how many of them this rank holds. Blocks follow each
/// other.
struct MergedBlock {
  int64_t rows = 1, local_rows = 1;

  MergedBlock(const Layout& layout, int64_t dim) {
    for (size_t c = 0; c < layout.cuts().size(); ++c) {
      if (layout.cuts()[c].dim != dim) continue;
      rows *= layout.cuts()[c].total();
      local_rows *= layout.local_size(c);
    }
  }
  bool divides(const SlicedRows& taken) const {
    return taken.step == 1 && taken.count() > 0 && taken.begin % rows == 0 &&
           taken.count() % rows == 0;
  }
};

/// Whole blocks of a merged dim, such as some samples of a batch whose tokens are cut.
Tensor blocks_of_merged_dim(const Tensor& x, int64_t dim, const SlicedRows& rows,
                            const MergedBlock& block) {
  Geometry g(x);
  g.sizes[dim] = rows.count();
  g.piece_sizes[dim] = rows.count() / block.rows * block.local_rows;
  const Layout* layout = &layout_of(x);
  remember_slice_origin(layout, x.sizes(), dim, rows.begin, 1, layout);
  return viewed(x, g, rows.begin * x.stride(dim),
                rows.begin / block.rows * block.local_rows * piece_of(x).stride(dim));
}

/// One row of a merged dim, size 1 there: its coordinates on the dim's factors tell who holds it.
Tensor row_of_merged_dim(const Tensor& x, int64_t dim, int64_t row, int64_t step) {
  const Layout& layout = layout_of(x);
  std::vector<Cut> cuts = layout.cuts();
  int64_t rest = row, local_row = 0, local_rows = 1;
  bool own = true;
  for (size_t c = cuts.size(); c-- > 0;) {  // the last cut is the fastest
    if (cuts[c].dim != dim) continue;
    const int64_t total = cuts[c].total(), at = rest % total;
    rest /= total;
    const int owner = spec::owner_of(cuts[c].sizes, at);
    own &= owner == layout.piece(c);
    local_row += (at - layout.local_offset(c)) * local_rows;
    local_rows *= layout.local_size(c);
    std::fill(cuts[c].sizes.begin(), cuts[c].sizes.end(), 0);
    cuts[c].sizes[owner] = 1;
  }
  local_row = own ? local_row + rest * local_rows : 0;
  Geometry g(x);
  g.sizes[dim] = 1;
  g.piece_sizes[dim] = own;
  const Layout* out = spec::intern_layout(layout.mesh(), std::move(cuts));
  remember_slice_origin(out, x.sizes(), dim, row, step, &layout);
  const Tensor& piece = piece_of(x);
  return make_view(tensor::strided_piece(piece, g.piece_sizes, g.piece_strides,
                                         piece.storage_offset() + local_row * piece.stride(dim)),
                   out, g.sizes, g.strides, x.storage_offset() + row * x.stride(dim), x);
}

/// Rows of one block of a dim with one cut; a dim that is not merged is one block.
Tensor rows_of_block(const Tensor& x, int64_t dim, const SlicedRows& rows, int64_t block) {
  const Layout& layout = layout_of(x);
  const auto c = static_cast<size_t>(layout.cut_on(static_cast<int>(dim)));
  std::vector<Cut> cuts = layout.cuts();
  Cut& cut = cuts[c];
  const int64_t step = rows.step, b = rows.begin - block * cut.total();
  const int64_t e = rows.count() == 0 ? b : b + rows.last() - rows.begin + 1;
  const int64_t from = layout.local_offset(c), to = from + layout.local_size(c);
  cut.sizes = sliced_sizes(cut, b, e, step);
  // First row of mine at or after b on the step grid.
  int64_t first = b >= from ? b : b + (from - b + step - 1) / step * step;
  first = std::clamp<int64_t>(first, from, to);
  const int64_t last = std::clamp<int64_t>(e, first, to);
  const int64_t local_row = block * layout.local_size(c) + first - from;
  Geometry g(x);
  g.sizes[dim] = rows.count();
  g.strides[dim] *= step;
  g.piece_strides[dim] *= step;
  g.piece_sizes[dim] = (last - first + step - 1) / step;
  const Layout* out = spec::intern_layout(layout.mesh(), std::move(cuts));
  remember_slice_origin(out, x.sizes(), dim, rows.begin, step, &layout);
  const Tensor& piece = piece_of(x);
  return make_view(tensor::strided_piece(piece, g.piece_sizes, g.piece_strides,
                                         piece.storage_offset() + local_row * piece.stride(dim)),
                   out, g.sizes, g.strides, x.storage_offset() + rows.begin * x.stride(dim), x);
}

/// Whether rows of a merged dim may be viewed where they lie: one row, whole blocks, or rows of one
/// block with one cut.
bool lie_together(const Tensor& x, const SlicedRows& rows, const MergedBlock& block) {
  if (rows.count() == 1 || block.divides(rows)) return true;
  return rows.count() > 0 && layout_of(x).has_single_cuts() &&
         rows.begin / block.rows == rows.last() / block.rows;
}

Tensor rows_of_merged_dim(const Tensor& x, int64_t dim, const SlicedRows& rows) {
  const MergedBlock block(layout_of(x), dim);
  if (!lie_together(x, rows, block))
    return tensor::as_moved_view(with_simple_cuts(x)).slice(dim, rows.begin, rows.end, rows.step);
  if (rows.count() == 1) return row_of_merged_dim(x, dim, rows.begin, rows.step);
  if (block.divides(rows)) return blocks_of_merged_dim(x, dim, rows, block);
  return rows_of_block(x, dim, rows, rows.begin / block.rows);
}

Tensor slice_kernel(const Tensor& x, int64_t dim, std::optional<c10::SymInt> start,
                    std::optional<c10::SymInt> end, c10::SymInt sym_step) {
  dim = at::maybe_wrap_dim(dim, x.dim());
  const SlicedRows rows = sliced_rows(x.size(dim), start, end, sym_step);
  if (is_merged(x, dim)) return rows_of_merged_dim(x, dim, rows);
  if (is_cut(x, dim)) return rows_of_block(x, dim, rows, 0);
  Geometry g(x);
  g.sizes[dim] = g.piece_sizes[dim] = rows.count();
  g.strides[dim] *= rows.step;
  g.piece_strides[dim] *= rows.step;
  return viewed(x, g, rows.begin * x.stride(dim), rows.begin * piece_of(x).stride(dim));
}

Tensor select_kernel(const Tensor& x, int64_t dim, c10::SymInt sym_index) {
  dim = at::maybe_wrap_dim(dim, x.dim());
  int64_t index = sym_index.expect_int();
  const int64_t n = x.size(dim);
  TORCH_CHECK_INDEX(index >= -n && index < n, "select(): index ", index,
                    " out of range for tensor of size ", x.sizes(), " at dimension ", dim);
  if (index < 0) index += n;
  if (layout_of(x).is_cut(static_cast<int>(dim))) {
    return slice_kernel(x, dim, index, index + 1, 1).squeeze(dim);
  }
  Geometry g(x);
  g.erase(dim);
  return viewed(x, g, index * x.stride(dim), index * piece_of(x).stride(dim));
}

std::vector<Tensor> unbind_kernel(const Tensor& x, int64_t dim) {
  std::vector<Tensor> rows;
  for (int64_t i = 0; i < x.size(dim); ++i) rows.push_back(x.select(dim, i));
  return rows;
}

std::vector<Tensor> split_with_sizes_kernel(const Tensor& x, c10::SymIntArrayRef size,
                                            int64_t dim) {
  std::vector<Tensor> parts;
  int64_t begin = 0;
  for (int64_t s : C10_AS_INTARRAYREF_SLOW(size)) {
    SHARDFIELD_CHECK(s >= 0, "split_with_sizes", "sizes must not be negative, got ", s);
    parts.push_back(x.slice(dim, begin, begin + s));
    begin += s;
  }
  SHARDFIELD_CHECK(begin == x.size(dim), "split_with_sizes", "expected sizes that sum to ",
                   x.size(dim), " (dim ", dim, " of ", tensor::describe(x), "), got ", begin);
  return parts;
}

std::vector<Tensor> split_kernel(const Tensor& x, c10::SymInt sym_size, int64_t dim) {
  const int64_t n = x.size(dim), size = sym_size.expect_int();
  SHARDFIELD_CHECK(size > 0 || (size == 0 && n == 0), "split", "split size must be positive, got ",
                   size);
  std::vector<Tensor> parts;
  for (int64_t b = 0; b < std::max<int64_t>(n, 1); b += std::max<int64_t>(size, 1))
    parts.push_back(x.slice(dim, b, std::min(b + size, n)));
  return parts;
}

Tensor slice_backward_kernel(const Tensor& grad, c10::SymIntArrayRef size, int64_t dim,
                             c10::SymInt start, c10::SymInt end, c10::SymInt sym_step) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  dim = at::maybe_wrap_dim(dim, static_cast<int64_t>(sizes.size()));
  const int64_t n = sizes[dim], step = sym_step.expect_int();
  const int64_t s = start.expect_int();
  const int64_t b = std::clamp<int64_t>(s < 0 ? s + n : s, 0, n);
  const Layout& layout = layout_of(grad);
  const Layout* whole =
      layout.is_cut(static_cast<int>(dim)) ? slice_origin(&layout, sizes, dim, b, step) : &layout;
  (void)end;
  Tensor out = tensor::make_sharded(
      at::zeros(tensor::piece_sizes(*whole, sizes), piece_of(grad).options()), whole, sizes);
  Tensor part = slice_kernel(out, dim, b, b + (grad.size(dim) - 1) * step + 1, step);
  if (grad.size(dim) > 0) part.copy_(grad);
  return out;
}

Tensor select_backward_kernel(const Tensor& grad, c10::SymIntArrayRef size, int64_t dim,
                              c10::SymInt index) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  dim = at::maybe_wrap_dim(dim, static_cast<int64_t>(sizes.size()));
  std::vector<int> new_dim(grad.dim());
  for (int d = 0; d < grad.dim(); ++d) new_dim[d] = d < dim ? d : d + 1;
  const Layout* whole = spec::renumber(layout_of(grad), new_dim);
  Tensor out = tensor::make_sharded(
      at::zeros(tensor::piece_sizes(*whole, sizes), piece_of(grad).options()), whole, sizes);
  select_kernel(out, dim, index).copy_(grad);
  return out;
}

Tensor select_above(c10::DispatchKeySet keys, const Tensor& x, int64_t dim, c10::SymInt index) {
  Tensor row = dispatch::call_view_formula<at::_ops::select_int>(keys, x, dim, index);
  if (is_cut(x, dim)) dispatch::reshard_gradient(row, x);
  return row;
}

Tensor slice_above(c10::DispatchKeySet keys, const Tensor& x, int64_t dim,
                   std::optional<c10::SymInt> start, std::optional<c10::SymInt> end,
                   c10::SymInt step) {
  const int64_t d = at::maybe_wrap_dim(dim, x.dim());
  if (is_merged(x, d)) {
    const SlicedRows rows = sliced_rows(x.size(d), start, end, step);
    if (!lie_together(x, rows, MergedBlock(layout_of(x), d))) return rows_of_merged_dim(x, d, rows);
  }
  return dispatch::call_view_formula<at::_ops::slice_Tensor>(keys, x, dim, start, end, step);
}

}  // namespace

SHARDFIELD_OPS(slice) {
  table.above_autograd("aten::select.int", TORCH_FN(select_above));
  table.above_autograd("aten::slice.Tensor", TORCH_FN(slice_above));
  table.view("aten::select.int", TORCH_FN(select_kernel));
  table.view("aten::slice.Tensor", TORCH_FN(slice_kernel));
  table.composed("aten::unbind.int", TORCH_FN(unbind_kernel));
  table.composed("aten::split.Tensor", TORCH_FN(split_kernel));
  table.composed("aten::split_with_sizes", TORCH_FN(split_with_sizes_kernel));
  table.backend("aten::slice_backward", TORCH_FN(slice_backward_kernel));
  table.backend("aten::select_backward", TORCH_FN(select_backward_kernel));
}

}  // namespace shardfield::ops
