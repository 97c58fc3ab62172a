// Other sizes over the same elements. Pieces whose borders fit them stay where they are; others are
// moved to the least extent first.

#include <ATen/ATen.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/dispatch/reshard_gradient.h"
#include "shardfield/ops/view_geometry.h"
#include "shardfield/ops/whole_dims.h"
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
    return viewed(x, Geometry(x));
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
  return x.permute(order);
}

/// A cut dim of size 1: the gradient of a view may come back with the cut on another dim, which
/// what made x would sum over.
bool has_cut_of_one(const Tensor& x) {
  return std::ranges::any_of(layout_of(x).cuts(),
                             [&](const Cut& cut) { return x.size(cut.dim) == 1; });
}

/// The view of x by PyTorch's formula, or of what had to move by `of_moved`.
template <class Op, class OfMoved, class... Args>
Tensor view_or_moved(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef size,
                     OfMoved&& of_moved, Args... args) {
  const Tensor fit = moved_to_fit(x, C10_AS_INTARRAYREF_SLOW(size));
  if (!fit.is_same(x)) return of_moved(fit);
  Tensor v = dispatch::call_view_formula<Op>(keys, x, size, args...);
  if (has_cut_of_one(x)) dispatch::reshard_gradient(v, x);
  return v;
}

/// A copy that refuses writes, as they would not reach the source.
Tensor view_above(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef size) {
  return view_or_moved<at::_ops::view>(keys, x, size, [&](const Tensor& fit) {
    if (tensor::is_sharded(fit)) return tensor::as_moved_view(fit).view_symint(size);
    const Tensor whole = fit.view_symint(size);
    return tensor::as_moved_view(
        tensor::scatter_like(whole, cut_of_copy(layout_of(x), whole.sizes())));
  });
}
Tensor unsafe_view_above(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef size) {
  return view_or_moved<at::_ops::_unsafe_view>(
      keys, x, size, [&](const Tensor& fit) { return at::_unsafe_view_symint(fit, size); });
}
/// What reshape calls, which may give a copy.
Tensor reshape_alias_above(c10::DispatchKeySet keys, const Tensor& x, c10::SymIntArrayRef size,
                           c10::SymIntArrayRef stride) {
  return view_or_moved<at::_ops::_reshape_alias>(
      keys, x, size, [&](const Tensor& fit) { return fit.view_symint(size); }, stride);
}

}  // namespace

SHARDFIELD_OPS(reshape) {
  table.above_autograd("aten::view", TORCH_FN(view_above));
  table.above_autograd("aten::_unsafe_view", TORCH_FN(unsafe_view_above));
  table.above_autograd("aten::_reshape_alias", TORCH_FN(reshape_alias_above));
  table.view("aten::view", TORCH_FN(view_kernel));
  table.view("aten::_unsafe_view", TORCH_FN(view_kernel));
  table.view("aten::_reshape_alias", TORCH_FN(reshape_alias_kernel));
  table.view("aten::as_strided", TORCH_FN(as_strided_kernel));
}

}  // namespace shardfield::ops
