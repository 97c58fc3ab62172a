// Average pooling and interpolation in reproducible mode. Which rows an output reads, and with
// which weight, follows from global indices, so every rank computes the same weights. A row is
// copied to each output that reads it; the gradient of copying is an exact sum over the outputs
// (with_exact_gradient). What is left are elementwise ops and sums.

#include <algorithm>
#include <numeric>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/exact_sums.h"
#include "shardfield/ops/reproducible_form.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/adaptive.h"
#include "shardfield/spec/finer_layout.h"
#include "shardfield/spec/resample.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

namespace op = at::_ops;
using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;
using spec::Layout;
using spec::MappedPiece;
using spec::ResampleMode;
using spec::Taps;
using tensor::is_sharded;
using tensor::layout_of;

/// Values of reduced precision are added in float32, as on one device.
Tensor widened(const Tensor& x) {
  const auto type = x.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? x.to(at::kFloat) : x;
}

/// One number per index of dim d of x, as an operand for x.
Tensor along(const std::vector<double>& values, const Tensor& x, int64_t d) {
  std::vector<int64_t> sizes(x.dim() - d, 1);
  sizes[0] = -1;
  return at::tensor(values, at::kDouble).view(sizes).to(x.device(), x.scalar_type());
}

/// The rows that each output of dim d reads: (width, ..., outputs, ...), cut where x is. Every rank
/// fetches those of its outputs from their owners.
/// @param pieces  of the cut of dim d, if there is one
Tensor rows_of_outputs(const Tensor& x, int64_t d, const Taps& taps,
                       const std::vector<MappedPiece>& pieces) {
  const Layout* layout = is_sharded(x) ? &layout_of(x) : nullptr;
  Tensor piece = layout ? tensor::local(x) : x;
  MappedPiece own{{0, taps.num_outputs}, {0, taps.num_rows}};
  if (!pieces.empty()) {
    const auto c = static_cast<size_t>(layout->cut_on(static_cast<int>(d)));
    std::vector<spec::Range> needed;
    std::vector<int64_t> outputs;
    for (const MappedPiece& p : pieces) {
      needed.push_back(p.inputs);
      outputs.push_back(p.outputs.size());
    }
    own = pieces[layout->piece(c)];
    piece = fetch_rows(piece, *layout, c, needed);
    layout = with_piece_sizes(*layout, {{static_cast<int>(d), outputs}});
  }
  std::vector<int64_t> index;
  for (int64_t tap = 0; tap < taps.width; ++tap)
    for (int64_t o = own.outputs.begin; o < own.outputs.end; ++o)
      index.push_back(taps.index[static_cast<size_t>(o * taps.width + tap)] - own.inputs.begin);
  Tensor rows = at::index_select(piece, d, index_tensor(index, piece))
                    .unflatten(d, {taps.width, own.outputs.size()})
                    .movedim(d, 0);
  if (!layout) return rows;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[d] = taps.num_outputs;
  sizes.insert(sizes.begin(), taps.width);
  std::vector<int> moved(x.dim());
  std::iota(moved.begin(), moved.end(), 1);
  return tensor::wrap(rows.contiguous(), spec::renumber(*layout, moved), sizes);
}

/// Sum over the taps of weight * row along dim d.
/// @param skips  taps of weight 0 do not count, not even their NaN
Tensor combined(const Tensor& x, int64_t d, const Taps& taps, bool skips,
                const std::vector<MappedPiece>& pieces) {
  Tensor rows =
      with_exact_gradient(x, [&](const Tensor& t) { return rows_of_outputs(t, d, taps, pieces); });
  std::vector<int64_t> sizes(rows.dim(), 1);
  sizes[0] = taps.width;
  sizes[d + 1] = taps.num_outputs;
  const Tensor weights = at::tensor(taps.weights, x.options().dtype(at::kDouble))
                             .view({taps.num_outputs, taps.width})
                             .t()
                             .reshape(sizes);
  if (skips) rows = rows.masked_fill(weights.eq(0), 0);
  return at::sum(rows * weights.to(x.scalar_type()), 0);
}

/// The number of the cut along dim d; -1 where it is whole.
int cut_along(const Tensor& x, int64_t d) {
  return is_sharded(x) ? layout_of(x).cut_on(static_cast<int>(d)) : -1;
}

/// PyTorch's own checks.
template <class Op, class... A>
void check_arguments(const Tensor& x, const A&... a) {
  Op::call(at::empty(x.sizes(), x.options().device(at::kMeta)), a...);
}

// Average pooling.

/// How many elements each output counts along a dim of num_rows.
std::vector<double> window_counts(int64_t num_rows, int64_t num_outputs, int64_t kernel,
                                  int64_t stride, int64_t padding, bool count_include_pad) {
  std::vector<double> counts;
  for (int64_t o = 0; o < num_outputs; ++o) {
    const int64_t begin = o * stride - padding;
    const int64_t end = std::min(begin + kernel, num_rows + padding);
    const int64_t inside = std::min(end, num_rows) - std::max<int64_t>(begin, 0);
    counts.push_back(static_cast<double>(count_include_pad ? end - begin : inside));
  }
  return counts;
}

/// The sum of a window, which lies whole on a rank, over its count.
template <class Op, int64_t n>
Tensor avg_pool(const Tensor& input, IntArrayRef kernel, IntArrayRef stride, IntArrayRef padding,
                bool ceil_mode, bool count_include_pad, std::optional<int64_t> divisor) {
  if (!at::isFloatingType(input.scalar_type())) {
    const dispatch::OrdinaryArithmetic ordinary;
    return Op::call(input, kernel, stride, padding, ceil_mode, count_include_pad, divisor);
  }
  SHARDFIELD_CHECK(divisor.value_or(1) != 0, "avg_pool", "divisor must be not zero");
  const Tensor x = widened(input);
  Tensor out = with_exact_gradient(
      x, [&](const Tensor& t) { return Op::call(t, kernel, stride, padding, ceil_mode, true, 1); });
  auto common = static_cast<double>(divisor.value_or(1));
  for (int64_t i = 0; i < n && !divisor; ++i) {
    const auto of_dim = [&](IntArrayRef values) { return values[values.size() == 1 ? 0 : i]; };
    const int64_t d = x.dim() - n + i, k = of_dim(kernel);
    const auto counts =
        window_counts(x.size(d), out.size(d), k, stride.empty() ? k : of_dim(stride),
                      of_dim(padding), count_include_pad);
    if (std::ranges::all_of(counts, [&](double count) { return count == counts[0]; }))
      common *= counts[0];
    else
      out = out / along(counts, out, d);
  }
  return (out / common).to(input.scalar_type());
}

/// The windows of one dim, made equally wide by taps of weight 0.
Taps adaptive_taps(int64_t num_rows, int64_t num_outputs) {
  Taps taps{num_rows, num_outputs, 0, {}, {}};
  for (int64_t o = 0; o < num_outputs; ++o)
    taps.width = std::max(taps.width, spec::adaptive_window(o, num_rows, num_outputs).size());
  for (int64_t o = 0; o < num_outputs; ++o) {
    const spec::Range window = spec::adaptive_window(o, num_rows, num_outputs);
    for (int64_t k = 0; k < taps.width; ++k) {
      taps.index.push_back(std::min(window.begin + k, window.end - 1));
      taps.weights.push_back(k < window.size() ? 1 : 0);
    }
  }
  return taps;
}

/// Dim after dim: an average over a window of rows is separable.
template <class Op>
Tensor adaptive_avg_pool(const Tensor& input, SymIntArrayRef size) {
  check_arguments<Op>(input, size);
  const auto out = C10_AS_INTARRAYREF_SLOW(size);
  if (c10::multiply_integers(out) == 0) {
    const dispatch::OrdinaryArithmetic ordinary;
    return Op::call(input, size);
  }
  Tensor x = widened(with_simple_cuts(input));
  std::vector<int64_t> to_one;
  for (size_t i = 0; i < out.size(); ++i) {
    const auto d = x.dim() - static_cast<int64_t>(out.size() - i);
    if (out[i] == 1) to_one.push_back(d);
    if (out[i] == 1 || out[i] == x.size(d)) continue;
    const Taps taps = adaptive_taps(x.size(d), out[i]);
    const int c = cut_along(x, d);
    std::vector<MappedPiece> pieces;
    if (c >= 0) pieces = spec::plan_adaptive(layout_of(x).cuts()[c].sizes, out[i]);
    std::vector<double> counts(out[i]);
    for (size_t k = 0; k < taps.weights.size(); ++k) counts[k / taps.width] += taps.weights[k];
    x = combined(x, d, taps, true, pieces);
    x = x / along(counts, x, d);
  }
  return (to_one.empty() ? x : at::mean(x, to_one, true)).to(input.scalar_type());
}

// Interpolation.

using Scale = std::optional<double>;

bool is_identity(const Taps& taps) {
  if (taps.num_rows != taps.num_outputs) return false;
  for (int64_t o = 0; o < taps.num_outputs; ++o) {
    const auto first = static_cast<size_t>(o * taps.width);
    if (taps.index[first] != o || taps.weights[first] != 1) return false;
  }
  return true;
}

/// Where the outputs of dim d of x lie. Upwards again they are cut as the finer tensor was, which a
/// skip connection will bring.
std::vector<MappedPiece> placed(const Tensor& x, int64_t d, const Taps& taps) {
  const int c = cut_along(x, d);
  if (c < 0) return {};
  const auto finer = spec::finer_sizes(layout_of(x), c, taps.num_outputs);
  return finer.empty() ? spec::plan_resample(layout_of(x).cuts()[c].sizes, taps)
                       : spec::plan_resample_to(finer, taps);
}

/// Dim after dim: these ops are separable.
template <class Op, class... Scales>
Tensor resampled(const Tensor& input, SymIntArrayRef size, bool align_corners, ResampleMode mode,
                 bool antialias, Scales... scales) {
  check_arguments<Op>(input, size, align_corners, scales...);
  if (!at::isFloatingType(input.scalar_type())) {
    const dispatch::OrdinaryArithmetic ordinary;
    return Op::call(input, size, align_corners, scales...);
  }
  const Tensor first = widened(with_simple_cuts(input));
  Tensor x = first;
  const Scale factors[] = {scales...};
  for (size_t i = 0; i < size.size(); ++i) {
    const auto d = static_cast<int64_t>(i) + 2;
    const bool single = x.scalar_type() != at::kDouble;
    const Taps taps = spec::resample_taps(
        x.size(d), size[i].guard_int(__FILE__, __LINE__),
        {mode, align_corners, antialias, factors[i], single, /*float_nearest=*/false});
    if (!is_identity(taps)) x = combined(x, d, taps, antialias, placed(first, d, taps));
  }
  return x.to(input.scalar_type());
}

/// The op's own signature.
template <class Op, ResampleMode mode, bool antialias = false, class Schema = typename Op::schema>
struct Resampled;
template <class Op, ResampleMode mode, bool antialias, class... Scales>
struct Resampled<Op, mode, antialias, Tensor(const Tensor&, SymIntArrayRef, bool, Scales...)> {
  static Tensor run(const Tensor& x, SymIntArrayRef size, bool align_corners, Scales... scales) {
    return resampled<Op>(x, size, align_corners, mode, antialias, scales...);
  }
};

}  // namespace

SHARDFIELD_OPS(reproducible_windows) {
  constexpr auto kLinear = ResampleMode::kLinear, kCubic = ResampleMode::kCubic;
  table.reproducible_composed("aten::avg_pool2d", TORCH_FN((avg_pool<op::avg_pool2d, 2>)));
  table.reproducible_composed("aten::avg_pool3d", TORCH_FN((avg_pool<op::avg_pool3d, 3>)));
  table.reproducible_composed("aten::adaptive_avg_pool2d",
                              TORCH_FN(adaptive_avg_pool<op::adaptive_avg_pool2d>));
  table.reproducible_composed("aten::adaptive_avg_pool3d",
                              TORCH_FN(adaptive_avg_pool<op::adaptive_avg_pool3d>));
  table.reproducible_composed("aten::_adaptive_avg_pool2d",
                              TORCH_FN(adaptive_avg_pool<op::_adaptive_avg_pool2d>));
  table.reproducible_composed("aten::_adaptive_avg_pool3d",
                              TORCH_FN(adaptive_avg_pool<op::_adaptive_avg_pool3d>));
  table.reproducible_composed("aten::upsample_linear1d",
                              TORCH_FN((Resampled<op::upsample_linear1d, kLinear>::run)));
  table.reproducible_composed("aten::upsample_bilinear2d",
                              TORCH_FN((Resampled<op::upsample_bilinear2d, kLinear>::run)));
  table.reproducible_composed("aten::upsample_trilinear3d",
                              TORCH_FN((Resampled<op::upsample_trilinear3d, kLinear>::run)));
  table.reproducible_composed("aten::upsample_bicubic2d",
                              TORCH_FN((Resampled<op::upsample_bicubic2d, kCubic>::run)));
  table.reproducible_composed(
      "aten::_upsample_bilinear2d_aa",
      TORCH_FN((Resampled<op::_upsample_bilinear2d_aa, kLinear, true>::run)));
  table.reproducible_composed("aten::_upsample_bicubic2d_aa",
                              TORCH_FN((Resampled<op::_upsample_bicubic2d_aa, kCubic, true>::run)));
}

}  // namespace shardfield::ops
