// fold and unfold of images (col2im, im2col). Unfold is written as two windows of a dim, which
// fetch their halo where the dim is cut. Fold treats channels by themselves: a cut on the positions
// moves to the channels, the blocks add up locally, and the image is cut along its rows again.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/range.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::IntArrayRef;
using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

Tensor meta_like(const Tensor& x) {
  return at::empty(x.sizes(), x.options().device(at::kMeta));
}

/// Windows of `size` taps, `dilation` apart, along dim: the taps become the last dim.
Tensor windows(const Tensor& x, int64_t dim, int64_t size, int64_t dilation, int64_t stride) {
  const Tensor w = x.unfold(dim, (size - 1) * dilation + 1, stride);
  return dilation == 1 ? w : w.slice(-1, 0, std::nullopt, dilation);
}

Tensor unfold_image(const Tensor& input, IntArrayRef kernel, IntArrayRef dilation,
                    IntArrayRef padding, IntArrayRef stride) {
  // PyTorch's own checks and result sizes.
  const auto sizes = at::im2col(meta_like(input), kernel, dilation, padding, stride).sizes().vec();
  const Tensor x = input.dim() == 3 ? input.unsqueeze(0) : input;
  const Tensor padded =
      padding[0] == 0 && padding[1] == 0
          ? x
          : at::constant_pad_nd(x, {padding[1], padding[1], padding[0], padding[0]});
  const Tensor rows = windows(padded, 2, kernel[0], dilation[0], stride[0]);
  const Tensor blocks = windows(rows, 3, kernel[1], dilation[1], stride[1]);
  return blocks.permute({0, 1, 4, 5, 2, 3}).reshape(sizes);
}

/// How the image of fold is cut: a cut on the positions becomes one on the rows, others stay.
const Layout* image_layout(const Layout& layout, int64_t taps, int64_t rows) {
  std::vector<Cut> cuts;
  for (Cut cut : layout.cuts()) {
    if (cut.dim == 1)
      for (int64_t& s : cut.sizes) {
        if (s % taps != 0) return nullptr;
        s /= taps;
      }
    if (cut.dim == 2) cut.sizes = spec::chunk_sizes(rows, static_cast<int64_t>(cut.sizes.size()));
    cuts.push_back(std::move(cut));
  }
  return spec::intern_layout(layout.mesh(), std::move(cuts));
}

Tensor fold_image(const Tensor& input, c10::SymIntArrayRef sym_size, IntArrayRef kernel,
                  IntArrayRef dilation, IntArrayRef padding, IntArrayRef stride) {
  const auto size = C10_AS_INTARRAYREF_SLOW(sym_size);
  const Tensor outer = at::col2im(meta_like(input), size, kernel, dilation, padding, stride);
  const bool batched = input.dim() == 3;
  const Tensor x = with_simple_cuts(batched ? input : input.unsqueeze(0));
  const auto fold = [&](const Tensor& t) {
    return at::col2im(t, size, kernel, dilation, padding, stride);
  };
  if (!is_sharded(x)) return batched ? fold(x) : fold(x).squeeze(0);
  const int64_t taps = kernel[0] * kernel[1], channels = x.size(1) / taps;
  Tensor blocks = x.reshape({x.size(0), channels, taps, x.size(2)});
  for (int64_t d : {3, 2}) blocks = with_whole_dim("col2im", blocks, d, {2, 3});
  Tensor image;
  if (is_sharded(blocks)) {
    // PyTorch refuses an image without channels.
    const Tensor own = tensor::local(blocks);
    const Tensor some = grown_to(own, {own.size(0), 1, taps, own.size(3)});
    Tensor piece = fold(some.reshape({own.size(0), some.size(1) * taps, own.size(3)}));
    if (own.size(1) == 0)
      piece = empty_result_like(piece, {own.size(0), 0, piece.size(2), piece.size(3)});
    image = tensor::wrap(piece, &layout_of(blocks),
                         {x.size(0), channels, outer.size(-2), outer.size(-1)});
  } else {
    image = fold(blocks.reshape(x.sizes()));
  }
  if (const Layout* back = image_layout(layout_of(x), taps, outer.size(-2)))
    image = tensor::redistribute(image, back);
  return batched ? image : image.squeeze(0);
}

}  // namespace

SHARDFIELD_OPS(fold) {
  table.composed("aten::im2col", TORCH_FN(unfold_image));
  table.composed("aten::col2im", TORCH_FN(fold_image));
}

}  // namespace shardfield::ops
