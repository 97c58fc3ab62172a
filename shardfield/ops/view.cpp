// Views: the outer geometry follows PyTorch's rules on outer sizes and strides, the piece is viewed
// alike. Every view aliases its source; what cannot alias is gathered with a fresh value and said
// so.

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/dispatch/reshard_gradient.h"
#include "shardfield/ops/slice_origin.h"
#include "shardfield/ops/unfold.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/range.h"
#include "shardfield/spec/reshape_layout.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/redistribute.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::layout_of;
using tensor::make_view;
using tensor::piece_of;
using Sizes = c10::SmallVector<int64_t, 5>;

/// Sizes and strides being rewritten, outside and of the piece alike, and where each old dim goes.
struct Geometry {
  Sizes sizes, strides;
  Sizes piece_sizes, piece_strides;
  c10::SmallVector<int, 8> new_dim;

  explicit Geometry(const Tensor& x)
      : sizes(x.sizes().begin(), x.sizes().end()),
        strides(x.strides().begin(), x.strides().end()),
        piece_sizes(piece_of(x).sizes().begin(), piece_of(x).sizes().end()),
        piece_strides(piece_of(x).strides().begin(), piece_of(x).strides().end()) {
    for (int d = 0; d < x.dim(); ++d) new_dim.push_back(d);
  }
  void erase(int64_t d) {
    for (Sizes* v : {&sizes, &strides, &piece_sizes, &piece_strides}) v->erase(v->begin() + d);
    for (int& k : new_dim) k = k == d ? -1 : k > d ? k - 1 : k;
  }
  void insert_one(int64_t d) {
    const bool last = d == static_cast<int64_t>(sizes.size());
    const int64_t outer = last ? 1 : sizes[d] * strides[d];
    const int64_t inner = last ? 1 : piece_sizes[d] * piece_strides[d];
    sizes.insert(sizes.begin() + d, 1);
    strides.insert(strides.begin() + d, outer);
    piece_sizes.insert(piece_sizes.begin() + d, 1);
    piece_strides.insert(piece_strides.begin() + d, inner);
    for (int& k : new_dim) k += k >= d;
  }
  void swap_dims(int64_t a, int64_t b) {
    for (Sizes* v : {&sizes, &strides, &piece_sizes, &piece_strides}) std::swap((*v)[a], (*v)[b]);
    std::swap(new_dim[a], new_dim[b]);
  }
};

/// The view of x with this geometry. Offsets in elements, added to those of x and of its piece.
Tensor viewed(const Tensor& x, const Geometry& g, int64_t offset = 0, int64_t piece_offset = 0) {
  const Layout* layout = spec::renumber(layout_of(x), {g.new_dim.data(), g.new_dim.size()});
  const Tensor& piece = piece_of(x);
  return make_view(tensor::strided_piece(piece, g.piece_sizes, g.piece_strides,
                                         piece.storage_offset() + piece_offset),
                   layout, g.sizes, g.strides, x.storage_offset() + offset, x);
}

bool is_cut(const Tensor& x, int64_t dim) {
  return x.dim() > 0 && layout_of(x).is_cut(static_cast<int>(at::maybe_wrap_dim(dim, x.dim())));
}

Tensor alias_kernel(const Tensor& x) {
  return viewed(x, Geometry(x));
}

Tensor permute_kernel(const Tensor& x, at::IntArrayRef dims) {
  SHARDFIELD_CHECK(static_cast<int64_t>(dims.size()) == x.dim(), "permute", "expected ", x.dim(),
                   " dims, got ", dims.size());
  const Geometry from(x);
  Geometry g(x);
  std::fill(g.new_dim.begin(), g.new_dim.end(), -1);
  for (size_t i = 0; i < dims.size(); ++i) {
    const int64_t d = at::maybe_wrap_dim(dims[i], x.dim());
    SHARDFIELD_CHECK(g.new_dim[d] == -1, "permute", "dim ", d, " appears twice in ", dims);
    g.sizes[i] = from.sizes[d];
    g.strides[i] = from.strides[d];
    g.piece_sizes[i] = from.piece_sizes[d];
    g.piece_strides[i] = from.piece_strides[d];
    g.new_dim[d] = static_cast<int>(i);
  }
  return viewed(x, g);
}

Tensor transpose_kernel(const Tensor& x, int64_t dim0, int64_t dim1) {
  if (x.dim() == 0) return alias_kernel(x);
  Geometry g(x);
  g.swap_dims(at::maybe_wrap_dim(dim0, x.dim()), at::maybe_wrap_dim(dim1, x.dim()));
  return viewed(x, g);
}

Tensor t_kernel(const Tensor& x) {
  SHARDFIELD_CHECK(x.dim() <= 2, "t", "expects at most 2 dims, got ", x.dim());
  return x.dim() < 2 ? alias_kernel(x) : transpose_kernel(x, 0, 1);
}

Tensor unsqueeze_kernel(const Tensor& x, int64_t dim) {
  Geometry g(x);
  g.insert_one(at::maybe_wrap_dim(dim, x.dim() + 1));
  return viewed(x, g);
}

/// What a copy in a view's place, and a row of one, is cut by: its longest dim over all axes. A
/// plain tensor could not refuse a write that the source would not see. Null when no dim is longer
/// than 1.
const Layout* cut_of_copy(const Layout& layout, at::IntArrayRef sizes) {
  const auto longest = std::ranges::max_element(sizes);
  if (longest == sizes.end() || *longest < 2) return nullptr;
  int64_t ranks = 1;
  for (const int a : layout.axes()) ranks *= layout.mesh().shape[a];
  return spec::intern_layout(layout.mesh(),
                             {{static_cast<int>(longest - sizes.begin()), layout.axes(),
                               spec::balanced_sizes(*longest, ranks)}});
}

/// x without its cuts on these dims of size 1: the row's owner keeps its memory, so writes reach x;
/// the others get its values. Collective over the dropped axes.
Tensor without_cuts(const Tensor& x, const std::vector<int64_t>& dims) {
  std::vector<int> keep(x.dim());
  for (int d = 0; d < x.dim(); ++d) keep[d] = d;
  bool owner = true;
  for (int64_t d : dims) {
    if (x.size(d) != 1) continue;
    keep[d] = -1;
  }
  const Layout& layout = layout_of(x);
  for (size_t c = 0; c < layout.cuts().size(); ++c)
    owner &= keep[layout.cuts()[c].dim] >= 0 || layout.local_size(c) == 1;
  const Layout* rest = spec::renumber(layout, keep);
  if (!rest && tensor::impl_of(x)->is_moved_view()) {
    rest = cut_of_copy(layout, x.sizes());
    owner = false;
  }
  Tensor piece = tensor::redistribute_piece(piece_of(x), &layout, rest, x.sizes());
  if (owner) piece = at::alias(piece_of(x));
  return make_view(piece, rest, x.sizes(), x.strides(), x.storage_offset(), x);
}

Tensor squeeze_dims(const Tensor& x, at::IntArrayRef dims) {
  std::vector<int64_t> gone;
  for (int64_t d : dims) {
    d = at::maybe_wrap_dim(d, x.dim());
    if (x.size(d) == 1 && std::find(gone.begin(), gone.end(), d) == gone.end()) gone.push_back(d);
  }
  std::sort(gone.rbegin(), gone.rend());
  for (int64_t d : gone) {
    if (!layout_of(x).is_cut(static_cast<int>(d))) continue;
    return without_cuts(x, gone).squeeze(dims);
  }
  Geometry g(x);
  for (int64_t d : gone) g.erase(d);
  return viewed(x, g);
}

Tensor squeeze_dim(const Tensor& x, int64_t dim) {
  return squeeze_dims(x, dim);
}

Tensor squeeze_kernel(const Tensor& x) {
  std::vector<int64_t> dims(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d) dims[d] = d;
  return squeeze_dims(x, dims);
}

Tensor expand_kernel(const Tensor& x, c10::SymIntArrayRef size, bool implicit) {
  const auto target = C10_AS_INTARRAYREF_SLOW(size);
  const int64_t shift = static_cast<int64_t>(target.size()) - x.dim();
  SHARDFIELD_CHECK(shift >= 0, "expand", "expected at least ", x.dim(), " sizes, got ", target);
  Geometry g(x);
  for (int64_t d = 0; d < shift; ++d) g.insert_one(0);
  for (int64_t d = 0; d < static_cast<int64_t>(target.size()); ++d) {
    const bool grows = d < shift || (target[d] != -1 && target[d] != g.sizes[d]);
    if (!grows) continue;
    if (d >= shift && layout_of(x).is_cut(static_cast<int>(d - shift))) {
      return without_cuts(x, {d - shift}).expand_symint(size, implicit);
    }
    SHARDFIELD_CHECK(g.sizes[d] == 1, "expand", "dim ", d, " has size ", g.sizes[d],
                     ", cannot become ", target[d], "; input ", tensor::describe(x));
    g.sizes[d] = g.piece_sizes[d] = target[d];
    g.strides[d] = g.piece_strides[d] = 0;
  }
  return viewed(x, g);
}

Tensor slice_kernel(const Tensor& x, int64_t dim, std::optional<c10::SymInt> start,
                    std::optional<c10::SymInt> end, c10::SymInt sym_step);

Tensor select_kernel(const Tensor& x, int64_t dim, c10::SymInt sym_index) {
  dim = at::maybe_wrap_dim(dim, x.dim());
  int64_t index = sym_index.expect_int();
  const int64_t n = x.size(dim);
  TORCH_CHECK_INDEX(index >= -n && index < n, "select(): index ", index,
                    " out of range for tensor of size ", x.sizes(), " at dimension ", dim);
  if (index < 0) index += n;
  if (layout_of(x).is_cut(static_cast<int>(dim))) {
    return without_cuts(slice_kernel(x, dim, index, index + 1, 1), {dim}).select(dim, 0);
  }
  Geometry g(x);
  g.erase(dim);
  return viewed(x, g, index * x.stride(dim), index * piece_of(x).stride(dim));
}

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

Tensor slice_kernel(const Tensor& x, int64_t dim, std::optional<c10::SymInt> start,
                    std::optional<c10::SymInt> end, c10::SymInt sym_step) {
  dim = at::maybe_wrap_dim(dim, x.dim());
  const SlicedRows rows = sliced_rows(x.size(dim), start, end, sym_step);
  const int64_t b = rows.begin, e = rows.end, step = rows.step;
  Geometry g(x);
  g.sizes[dim] = rows.count();
  g.strides[dim] *= step;
  g.piece_strides[dim] *= step;
  const Layout& layout = layout_of(x);
  const int c = layout.cut_on(static_cast<int>(dim));
  if (c < 0) {
    g.piece_sizes[dim] = g.sizes[dim];
    return viewed(x, g, b * x.stride(dim), b * piece_of(x).stride(dim));
  }
  if (is_merged(x, dim)) {
    if (rows.count() == 1) return row_of_merged_dim(x, dim, b, step);
    return tensor::as_moved_view(with_simple_cuts(x)).slice(dim, b, e, step);
  }
  std::vector<Cut> cuts = layout.cuts();
  Cut& cut = cuts[c];
  const int64_t from = layout.local_offset(c), to = from + layout.local_size(c);
  cut.sizes = sliced_sizes(cut, b, e, step);
  // First row of mine at or after b on the step grid.
  int64_t first = b >= from ? b : b + (from - b + step - 1) / step * step;
  first = std::clamp<int64_t>(first, from, to);
  const int64_t last = std::clamp<int64_t>(e, first, to);
  const Layout* out = spec::intern_layout(layout.mesh(), std::move(cuts));
  remember_slice_origin(out, x.sizes(), dim, b, step, &layout);
  const Tensor& piece = piece_of(x);
  g.piece_sizes[dim] = (last - first + step - 1) / step;
  return make_view(
      tensor::strided_piece(piece, g.piece_sizes, g.piece_strides,
                            piece.storage_offset() + (first - from) * piece.stride(dim)),
      out, g.sizes, g.strides, x.storage_offset() + b * x.stride(dim), x);
}

/// PyTorch's own rule decides whether outer sizes can be viewed.
Sizes view_strides(const Tensor& x, at::IntArrayRef sizes) {
  auto strides = at::detail::computeStride(x.sizes(), x.strides(), sizes);
  SHARDFIELD_CHECK(strides.has_value(), "view", "size ", sizes,
                   " is not compatible with input size ", x.sizes(), " and stride ", x.strides(),
                   "; use reshape");
  return {strides->begin(), strides->end()};
}

Tensor reshaped(const Tensor& x, at::IntArrayRef sizes, at::IntArrayRef strides) {
  const Layout& layout = layout_of(x);
  const auto moved = spec::cached_reshape_layout(layout, {x.sizes().data(), x.sizes().size()},
                                                 {sizes.data(), sizes.size()});
  if (!moved) {
    const Layout* before = spec::layout_before_reshape(layout, {x.sizes().data(), x.sizes().size()},
                                                       {sizes.data(), sizes.size()});
    return tensor::redistribute(x, before).reshape(sizes);
  }
  const Tensor& piece = piece_of(x);
  if (piece.sizes() == x.sizes() && piece.strides() == x.strides()) {
    return make_view(tensor::strided_piece(piece, sizes, strides, piece.storage_offset()), *moved,
                     sizes, strides, x.storage_offset(), x);
  }
  const auto local = tensor::piece_sizes(**moved, sizes);
  const auto local_strides = at::detail::computeStride(piece.sizes(), piece.strides(), local);
  // The piece's own memory order may not allow what the outer one does: then it is copied.
  if (!local_strides)
    return tensor::as_moved_view(
        make_view(piece.reshape(local), *moved, sizes, strides, x.storage_offset(), x));
  return make_view(tensor::strided_piece(piece, local, *local_strides, piece.storage_offset()),
                   *moved, sizes, strides, x.storage_offset(), x);
}

Tensor view_kernel(const Tensor& x, c10::SymIntArrayRef size) {
  const auto target = C10_AS_INTARRAYREF_SLOW(size);
  const auto sizes = at::infer_size_dv(target, x.numel());
  return reshaped(x, sizes, view_strides(x, sizes));
}

Tensor reshape_alias_kernel(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  return reshaped(x, C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride));
}

/// Above autograd: pieces whose borders do not fit the new shape are moved first, differentiably.
/// The result then is a copy, which reshape may give and view must not let be written.
Tensor moved_to_fit(const Tensor& x, at::IntArrayRef target) {
  const auto sizes = at::infer_size_dv(target, x.numel());
  const Layout& layout = layout_of(x);
  const std::span<const int64_t> from{x.sizes().data(), x.sizes().size()},
      to{sizes.data(), sizes.size()};
  if (spec::cached_reshape_layout(layout, from, to)) return x;
  const Layout* before = spec::layout_before_reshape(layout, from, to);
  if (!before) {
    const Tensor simple = with_simple_cuts(x);
    if (!simple.is_same(x)) return moved_to_fit(simple, target).contiguous();
  }
  return tensor::redistribute(x, before).contiguous();
}

Tensor as_strided_kernel(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<c10::SymInt> sym_offset) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  const int64_t offset = sym_offset ? sym_offset->expect_int() : x.storage_offset();
  if (sizes == x.sizes() && strides == x.strides() && offset == x.storage_offset())
    return alias_kernel(x);
  std::vector<int64_t> order;
  if (offset == x.storage_offset() && static_cast<int64_t>(sizes.size()) == x.dim()) {
    for (size_t i = 0; i < sizes.size(); ++i)
      for (int64_t d = 0; d < x.dim(); ++d)
        if (x.size(d) == sizes[i] && x.stride(d) == strides[i] &&
            std::find(order.begin(), order.end(), d) == order.end()) {
          order.push_back(d);
          break;
        }
  }
  SHARDFIELD_CHECK(static_cast<int64_t>(order.size()) == x.dim() && !order.empty(), "as_strided",
                   "a sharded tensor has no strides in memory: got sizes ", sizes, ", strides ",
                   strides, ", offset ", offset, " for ", tensor::describe(x),
                   "; use view, permute, slice, or x.full_tensor()");
  return permute_kernel(x, order);
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

/// View ops on dims that are not cut: the op on the piece; outer geometry from PyTorch's meta rule.
template <class F>
Tensor on_whole_dims(const char* op, const Tensor& x, at::IntArrayRef dims, F&& view_op) {
  for (int64_t d : dims)
    SHARDFIELD_CHECK(
        !layout_of(x).is_cut(static_cast<int>(at::maybe_wrap_dim(d, x.dim()))), op, "dim ", d,
        " is cut in ", tensor::describe(x),
        " and a gathered copy would lose writes; redistribute it or use full_tensor() first");
  const Tensor outer =
      view_op(at::empty_strided(x.sizes(), x.strides(), x.options().device(at::kMeta)));
  const Tensor piece = view_op(piece_of(x));
  Geometry g(x);
  // Named dims leave or move to the end: the rest keeps its order.
  if (outer.dim() == x.dim() - 1 || outer.sizes() != x.sizes()) {
    int at = 0;
    for (int64_t d = 0; d < x.dim(); ++d) {
      const bool named = std::any_of(
          dims.begin(), dims.end(), [&](int64_t k) { return at::maybe_wrap_dim(k, x.dim()) == d; });
      g.new_dim[d] = named && dims.size() > 1 ? -1 : at++;
    }
  }
  const Layout* layout = spec::renumber(layout_of(x), {g.new_dim.data(), g.new_dim.size()});
  return make_view(piece, layout, outer.sizes(), outer.strides(),
                   x.storage_offset() + outer.storage_offset(), x);
}

Tensor unfold_kernel(const Tensor& x, int64_t dim, int64_t size, int64_t step) {
  if (is_cut(x, dim)) return unfold_cut_dim(x, dim, size, step);
  return on_whole_dims("unfold", x, {dim},
                       [&](const Tensor& t) { return t.unfold(dim, size, step); });
}
Tensor view_dtype(const Tensor& x, at::ScalarType dtype) {
  return on_whole_dims(
      "view", x,
      c10::elementSize(dtype) == x.itemsize() ? at::IntArrayRef() : at::IntArrayRef({-1}),
      [&](const Tensor& t) { return t.view(dtype); });
}
Tensor view_as_real_kernel(const Tensor& x) {
  return on_whole_dims("view_as_real", x, {}, [](const Tensor& t) { return at::view_as_real(t); });
}
Tensor view_as_complex_kernel(const Tensor& x) {
  return on_whole_dims("view_as_complex", x, {-1},
                       [](const Tensor& t) { return at::view_as_complex(t); });
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

/// In-place view ops change the geometry of the tensor itself.
template <class F>
Tensor& reshape_in_place(Tensor& x, F&& view_op) {
  const Tensor v = view_op(x);
  SHARDFIELD_CHECK(tensor::is_sharded(v), "in-place view", "would leave ", tensor::describe(x),
                   " without a cut; use the out-of-place form");
  tensor::impl_of(x)->become(*tensor::impl_of(v));
  return x;
}
Tensor& squeeze_dim_(Tensor& x, int64_t dim) {
  return reshape_in_place(x, [&](const Tensor& t) { return squeeze_dim(t, dim); });
}
Tensor& squeeze_dims_(Tensor& x, at::IntArrayRef dims) {
  return reshape_in_place(x, [&](const Tensor& t) { return squeeze_dims(t, dims); });
}
Tensor& squeeze_in_place_kernel(Tensor& x) {
  return reshape_in_place(x, squeeze_kernel);
}
Tensor& unsqueeze_in_place_kernel(Tensor& x, int64_t dim) {
  return reshape_in_place(x, [&](const Tensor& t) { return unsqueeze_kernel(t, dim); });
}
Tensor& transpose_in_place_kernel(Tensor& x, int64_t a, int64_t b) {
  return reshape_in_place(x, [&](const Tensor& t) { return transpose_kernel(t, a, b); });
}
Tensor& t_in_place_kernel(Tensor& x) {
  return reshape_in_place(x, t_kernel);
}

Tensor unfold_above(c10::DispatchKeySet keys, const Tensor& x, int64_t dim, int64_t size,
                    int64_t step) {
  if (is_cut(x, dim)) return unfold_cut_dim(x, dim, size, step);
  Tensor v = dispatch::call_view_formula<at::_ops::unfold>(keys, x, dim, size, step);
  dispatch::reshard_gradient(v, x);
  return v;
}

// Above autograd: where a view cannot alias (its rows live elsewhere) the rows are moved by a
// differentiable step first; else PyTorch's own formula runs.

Tensor select_above(c10::DispatchKeySet keys, const Tensor& x, int64_t dim, c10::SymInt index) {
  Tensor row = dispatch::call_view_formula<at::_ops::select_int>(keys, x, dim, index);
  if (is_cut(x, dim)) dispatch::reshard_gradient(row, x);
  return row;
}

Tensor slice_above(c10::DispatchKeySet keys, const Tensor& x, int64_t dim,
                   std::optional<c10::SymInt> start, std::optional<c10::SymInt> end,
                   c10::SymInt step) {
  if (is_cut(x, dim) && is_merged(x, at::maybe_wrap_dim(dim, x.dim())) &&
      sliced_rows(x.size(dim), start, end, step).count() != 1)
    return slice_kernel(x, dim, start, end, step);
  return dispatch::call_view_formula<at::_ops::slice_Tensor>(keys, x, dim, start, end, step);
}

Tensor expand_above(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef size,
                    bool implicit) {
  const auto target = C10_AS_INTARRAYREF_SLOW(size);
  const int64_t shift = static_cast<int64_t>(target.size()) - x.dim();
  Tensor wide = dispatch::call_view_formula<at::_ops::expand>(keys, x, size, implicit);
  for (const Cut& cut : layout_of(x).cuts()) {
    const int64_t wanted = shift < 0 ? -1 : target[cut.dim + shift];
    if (wanted != -1 && wanted != x.size(cut.dim)) dispatch::reshard_gradient(wide, x);
  }
  return wide;
}

Tensor squeeze_dims_above(c10::DispatchKeySet keys, const Tensor& x, at::IntArrayRef dims) {
  Tensor flat = dispatch::call_view_formula<at::_ops::squeeze_dims>(keys, x, dims);
  bool moved = false;
  for (int64_t d : dims) moved |= is_cut(x, d) && x.size(d) == 1;
  if (moved) dispatch::reshard_gradient(flat, x);
  return flat;
}
Tensor squeeze_dim_above(c10::DispatchKeySet keys, const Tensor& x, int64_t dim) {
  return squeeze_dims_above(keys, x, dim);
}
Tensor squeeze_above(c10::DispatchKeySet keys, const Tensor& x) {
  std::vector<int64_t> dims(x.dim());
  for (int64_t d = 0; d < x.dim(); ++d) dims[d] = d;
  return squeeze_dims_above(keys, x, dims);
}

/// A cut dim of size 1: the gradient of a view may come back with the cut on another dim, which
/// what made x would sum over.
bool has_cut_of_one(const Tensor& x) {
  return std::ranges::any_of(layout_of(x).cuts(),
                             [&](const Cut& cut) { return x.size(cut.dim) == 1; });
}

Tensor view_above(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef size) {
  const auto target = C10_AS_INTARRAYREF_SLOW(size);
  const Tensor fit = moved_to_fit(x, target);
  if (fit.is_same(x)) {
    Tensor v = dispatch::call_view_formula<at::_ops::view>(keys, x, size);
    if (has_cut_of_one(x)) dispatch::reshard_gradient(v, x);
    return v;
  }
  if (tensor::is_sharded(fit)) return tensor::as_moved_view(fit).view_symint(size);
  const Tensor whole = fit.view_symint(size);
  return tensor::as_moved_view(
      tensor::scatter_like(whole, cut_of_copy(layout_of(x), whole.sizes())));
}
Tensor unsafe_view_above(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef size) {
  const Tensor fit = moved_to_fit(x, C10_AS_INTARRAYREF_SLOW(size));
  if (!fit.is_same(x)) return at::_unsafe_view_symint(fit, size);
  Tensor v = dispatch::call_view_formula<at::_ops::_unsafe_view>(keys, x, size);
  if (has_cut_of_one(x)) dispatch::reshard_gradient(v, x);
  return v;
}
Tensor reshape_alias_above(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  const Tensor fit = moved_to_fit(x, C10_AS_INTARRAYREF_SLOW(size));
  if (!fit.is_same(x)) return fit.view_symint(size);
  return dispatch::call_view_formula<at::_ops::_reshape_alias>(keys, x, size, stride);
}

}  // namespace

SHARDFIELD_OPS(view) {
  table.above_autograd("aten::unfold", TORCH_FN(unfold_above));
  table.above_autograd("aten::select.int", TORCH_FN(select_above));
  table.above_autograd("aten::slice.Tensor", TORCH_FN(slice_above));
  table.above_autograd("aten::expand", TORCH_FN(expand_above));
  table.above_autograd("aten::squeeze", TORCH_FN(squeeze_above));
  table.above_autograd("aten::squeeze.dim", TORCH_FN(squeeze_dim_above));
  table.above_autograd("aten::squeeze.dims", TORCH_FN(squeeze_dims_above));
  table.above_autograd("aten::view", TORCH_FN(view_above));
  table.above_autograd("aten::_unsafe_view", TORCH_FN(unsafe_view_above));
  table.above_autograd("aten::_reshape_alias", TORCH_FN(reshape_alias_above));
  table.view("aten::alias", TORCH_FN(alias_kernel));
  table.view("aten::detach", TORCH_FN(alias_kernel));
  table.view("aten::permute", TORCH_FN(permute_kernel));
  table.view("aten::transpose.int", TORCH_FN(transpose_kernel));
  table.view("aten::t", TORCH_FN(t_kernel));
  table.view("aten::unsqueeze", TORCH_FN(unsqueeze_kernel));
  table.view("aten::squeeze", TORCH_FN(squeeze_kernel));
  table.view("aten::squeeze.dim", TORCH_FN(squeeze_dim));
  table.view("aten::squeeze.dims", TORCH_FN(squeeze_dims));
  table.view("aten::expand", TORCH_FN(expand_kernel));
  table.view("aten::select.int", TORCH_FN(select_kernel));
  table.view("aten::slice.Tensor", TORCH_FN(slice_kernel));
  table.view("aten::view", TORCH_FN(view_kernel));
  table.view("aten::_unsafe_view", TORCH_FN(view_kernel));
  table.view("aten::_reshape_alias", TORCH_FN(reshape_alias_kernel));
  table.view("aten::as_strided", TORCH_FN(as_strided_kernel));
  table.view("aten::unfold", TORCH_FN(unfold_kernel));
  table.view("aten::view.dtype", TORCH_FN(view_dtype));
  table.view("aten::view_as_real", TORCH_FN(view_as_real_kernel));
  table.view("aten::view_as_complex", TORCH_FN(view_as_complex_kernel));
  table.composed("aten::unbind.int", TORCH_FN(unbind_kernel));
  table.composed("aten::split.Tensor", TORCH_FN(split_kernel));
  table.composed("aten::split_with_sizes", TORCH_FN(split_with_sizes_kernel));
  table.backend("aten::slice_backward", TORCH_FN(slice_backward_kernel));
  table.backend("aten::select_backward", TORCH_FN(select_backward_kernel));
  table.view("aten::squeeze_", TORCH_FN(squeeze_in_place_kernel));
  table.view("aten::squeeze_.dim", TORCH_FN(squeeze_dim_));
  table.view("aten::squeeze_.dims", TORCH_FN(squeeze_dims_));
  table.view("aten::unsqueeze_", TORCH_FN(unsqueeze_in_place_kernel));
  table.view("aten::transpose_", TORCH_FN(transpose_in_place_kernel));
  table.view("aten::t_", TORCH_FN(t_in_place_kernel));
}

}  // namespace shardfield::ops
