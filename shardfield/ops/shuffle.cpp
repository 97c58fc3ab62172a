// Pixel shuffle, pixel unshuffle and channel shuffle. Cut spatial dims stay cut: a piece of h rows
// becomes h * r rows, or h / r after its borders were moved to multiples of r.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/exchange/rows.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;

/// Piece sizes with inner borders moved to the nearest multiple of `unit`.
std::vector<int64_t> multiples(const std::vector<int64_t>& sizes, int64_t unit) {
  std::vector<int64_t> out;
  int64_t border = 0, last = 0, total = 0;
  for (int64_t s : sizes) total += s;
  for (int64_t s : sizes) {
    border += s;
    const int64_t moved = std::min((border + unit / 2) / unit * unit, total);
    out.push_back(moved - last);
    last = moved;
  }
  return out;
}

/// x with the cut on `dim` in pieces divisible by `unit` (moved only where they are not).
Tensor with_multiples(const Tensor& x, int64_t dim, int64_t unit) {
  const Layout& layout = tensor::layout_of(x);
  const int c = layout.cut_on(static_cast<int>(dim));
  if (c < 0) return x;
  const auto sizes = multiples(layout.cuts()[c].sizes, unit);
  return tensor::redistribute(x, with_piece_sizes(layout, {{static_cast<int>(dim), sizes}}));
}

std::vector<int64_t> scaled(const Layout& layout, int64_t dim, int64_t times, int64_t over) {
  std::vector<int64_t> sizes;
  const int c = layout.cut_on(static_cast<int>(dim));
  if (c < 0) return sizes;
  for (int64_t s : layout.cuts()[c].sizes) sizes.push_back(s * times / over);
  return sizes;
}

std::vector<int64_t> iota(int64_t n) {
  std::vector<int64_t> v(n);
  for (int64_t i = 0; i < n; ++i) v[i] = i;
  return v;
}

Tensor pixel_shuffle_sharded(const Tensor& input, int64_t r) {
  const int64_t nd = input.dim(), c = nd - 3;
  SHARDFIELD_CHECK(nd >= 3 && r > 0, "pixel_shuffle", "expected at least 3 dims and a positive ",
                   "upscale_factor, got ", tensor::describe(input), " and ", r);
  SHARDFIELD_CHECK(input.size(c) % (r * r) == 0, "pixel_shuffle",
                   "expects its input's 'channel' dimension to be "
                   "divisible by the square of upscale_factor, but input.size(-3)=",
                   input.size(c), " is not divisible by ", r * r);
  const Tensor x = with_multiples(with_simple_cuts(input), c, r * r);
  if (!is_sharded(x)) return at::pixel_shuffle(x, r);
  const Layout& layout = tensor::layout_of(x);
  const Tensor piece = tensor::local(x);
  auto parts = piece.sizes().slice(0, c).vec();
  auto order = iota(c);
  const auto local = piece.sizes().slice(c).vec();
  parts.insert(parts.end(), {local[0] / (r * r), r, r, local[1], local[2]});
  order.insert(order.end(), {c, c + 3, c + 1, c + 4, c + 2});
  auto own = piece.sizes().slice(0, c).vec();
  own.insert(own.end(), {local[0] / (r * r), local[1] * r, local[2] * r});
  auto sizes = x.sizes().vec();
  sizes[c] /= r * r;
  sizes[c + 1] *= r;
  sizes[c + 2] *= r;
  const Layout* out = with_piece_sizes(layout, {{c, scaled(layout, c, 1, r * r)},
                                                {c + 1, scaled(layout, c + 1, r, 1)},
                                                {c + 2, scaled(layout, c + 2, r, 1)}});
  return wrap_in_format_of(input, piece.reshape(parts).permute(order).reshape(own), out, sizes);
}

Tensor pixel_unshuffle_sharded(const Tensor& input, int64_t r) {
  const int64_t nd = input.dim(), c = nd - 3;
  SHARDFIELD_CHECK(nd >= 3 && r > 0, "pixel_unshuffle", "expected at least 3 dims and a positive ",
                   "downscale_factor, got ", tensor::describe(input), " and ", r);
  for (int64_t d = c + 1; d < nd; ++d)
    SHARDFIELD_CHECK(
        input.size(d) % r == 0, "pixel_unshuffle", "expects height and width to be divisible by ",
        "downscale_factor, but input.size(", d, ")=", input.size(d), " is not divisible by ", r);
  Tensor x = with_simple_cuts(input);
  for (int64_t d = c + 1; d < nd && is_sharded(x); ++d) x = with_multiples(x, d, r);
  if (!is_sharded(x)) return at::pixel_unshuffle(x, r);
  const Layout& layout = tensor::layout_of(x);
  const Tensor piece = tensor::local(x);
  const auto local = piece.sizes().slice(c).vec();
  auto parts = piece.sizes().slice(0, c).vec();
  auto order = iota(c);
  parts.insert(parts.end(), {local[0], local[1] / r, r, local[2] / r, r});
  order.insert(order.end(), {c, c + 2, c + 4, c + 1, c + 3});
  auto own = piece.sizes().slice(0, c).vec();
  own.insert(own.end(), {local[0] * r * r, local[1] / r, local[2] / r});
  auto sizes = x.sizes().vec();
  sizes[c] *= r * r;
  sizes[c + 1] /= r;
  sizes[c + 2] /= r;
  const Layout* out = with_piece_sizes(layout, {{c, scaled(layout, c, r * r, 1)},
                                                {c + 1, scaled(layout, c + 1, 1, r)},
                                                {c + 2, scaled(layout, c + 2, 1, r)}});
  return wrap_in_format_of(input, piece.reshape(parts).permute(order).reshape(own), out, sizes);
}

Tensor channel_shuffle_sharded(const Tensor& input, c10::SymInt sym_groups) {
  const int64_t groups = sym_groups.expect_int();
  SHARDFIELD_CHECK(input.dim() > 2 && groups > 0 && input.size(1) % groups == 0, "channel_shuffle",
                   "expected at least 3 dims and channels divisible by groups, got ",
                   tensor::describe(input), " and groups=", groups);
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return at::channel_shuffle(x, groups);
  const Layout& layout = tensor::layout_of(x);
  const int64_t channels = x.size(1), per_group = channels / groups;
  const int c = layout.cut_on(1);
  Tensor piece = tensor::local(x);
  if (c < 0) {
    auto parts = piece.sizes().vec();
    parts[1] = per_group;
    parts.insert(parts.begin() + 1, groups);
    piece = piece.reshape(parts).transpose(1, 2).reshape(piece.sizes());
  } else {
    std::vector<std::vector<spec::Segment>> wanted;
    int64_t channel = 0;
    for (int64_t n : layout.cuts()[c].sizes) {
      wanted.emplace_back();
      for (int64_t k = 0; k < n; ++k, ++channel)
        wanted.back().push_back({channel % groups * per_group + channel / groups, 1, 1});
    }
    piece = fetch_rows(piece, layout, static_cast<size_t>(c), std::move(wanted));
  }
  return wrap_in_format_of(input, piece, &layout, x.sizes());
}

}  // namespace

SHARDFIELD_OPS(shuffle) {
  table.composed("aten::pixel_shuffle", TORCH_FN(pixel_shuffle_sharded));
  table.composed("aten::pixel_unshuffle", TORCH_FN(pixel_unshuffle_sharded));
  table.composed("aten::channel_shuffle", TORCH_FN(channel_shuffle_sharded));
  table.composed("aten::native_channel_shuffle", TORCH_FN(channel_shuffle_sharded));
}

}  // namespace shardfield::ops
