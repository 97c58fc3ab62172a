// Views that move, add or drop dims: the outer geometry follows PyTorch's rules on outer sizes and
// strides, the piece is viewed alike. Every view aliases its source.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/dispatch/reshard_gradient.h"
#include "shardfield/ops/unfold.h"
#include "shardfield/ops/view_geometry.h"
#include "shardfield/ops/whole_dims.h"
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

}  // namespace

SHARDFIELD_OPS(view) {
  table.above_autograd("aten::unfold", TORCH_FN(unfold_above));
  table.above_autograd("aten::expand", TORCH_FN(expand_above));
  table.above_autograd("aten::squeeze", TORCH_FN(squeeze_above));
  table.above_autograd("aten::squeeze.dim", TORCH_FN(squeeze_dim_above));
  table.above_autograd("aten::squeeze.dims", TORCH_FN(squeeze_dims_above));
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
  table.view("aten::unfold", TORCH_FN(unfold_kernel));
  table.view("aten::view.dtype", TORCH_FN(view_dtype));
  table.view("aten::view_as_real", TORCH_FN(view_as_real_kernel));
  table.view("aten::view_as_complex", TORCH_FN(view_as_complex_kernel));
  table.view("aten::squeeze_", TORCH_FN(squeeze_in_place_kernel));
  table.view("aten::squeeze_.dim", TORCH_FN(squeeze_dim_));
  table.view("aten::squeeze_.dims", TORCH_FN(squeeze_dims_));
  table.view("aten::unsqueeze_", TORCH_FN(unsqueeze_in_place_kernel));
  table.view("aten::transpose_", TORCH_FN(transpose_in_place_kernel));
  table.view("aten::t_", TORCH_FN(t_in_place_kernel));
}

}  // namespace shardfield::ops
