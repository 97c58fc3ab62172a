#include "shardfield/ops/unfold.h"

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/window.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

using at::Tensor;

Tensor unfold_cut_dim(const Tensor& x, int64_t dim, int64_t size, int64_t step) {
  dim = at::maybe_wrap_dim(dim, x.dim());
  const Tensor simple = with_simple_cuts(x);
  if (!tensor::is_sharded(simple)) return simple.unfold(dim, size, step);
  // PyTorch's own checks and result sizes.
  const Tensor outer = at::empty(x.sizes(), x.options().device(at::kMeta)).unfold(dim, size, step);
  const spec::Layout& layout = tensor::layout_of(simple);
  const int c = layout.cut_on(static_cast<int>(dim));
  if (c < 0) return simple.unfold(dim, size, step);
  const auto plan = spec::plan_window(layout.cuts()[c].sizes, {std::max<int64_t>(size, 1), step},
                                      outer.size(dim));
  std::vector<spec::Range> needed;
  std::vector<int64_t> windows;
  for (const spec::WindowPiece& piece : plan) {
    needed.push_back(piece.inputs);
    windows.push_back(piece.outputs.size());
  }
  const spec::Layout* out = with_piece_sizes(layout, {{static_cast<int>(dim), windows}});
  const Tensor rows = fetch_rows(tensor::local(simple), layout, c, needed);
  const Tensor piece = windows[layout.piece(c)] > 0
                           ? rows.unfold(dim, size, step).contiguous()
                           : empty_result(rows, tensor::piece_sizes(*out, outer.sizes()));
  return tensor::as_moved_view(tensor::wrap(piece, out, outer.sizes()));
}

namespace {

/// Along a whole dim each rank adds up its own windows.
Tensor unfold_backward(const Tensor& grad, c10::SymIntArrayRef size, int64_t dim, int64_t window,
                       int64_t step) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  dim = at::maybe_wrap_dim(dim, static_cast<int64_t>(sizes.size()));
  const spec::Layout* whole =
      without_cuts_on(tensor::layout_of(grad), {dim, static_cast<int64_t>(sizes.size())});
  const Tensor moved = tensor::redistribute(grad, whole);
  if (!whole) return at::unfold_backward(moved, sizes, dim, window, step);
  return tensor::make_sharded(
      at::unfold_backward(tensor::piece_of(moved), tensor::piece_sizes(*whole, sizes), dim, window,
                          step),
      whole, sizes);
}

}  // namespace

SHARDFIELD_OPS(unfold) {
  table.backend("aten::unfold_backward", TORCH_FN(unfold_backward));
}

}  // namespace shardfield::ops
