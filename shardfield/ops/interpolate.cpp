// Interpolation. Separable: every rank fetches the rows its outputs read, once per cut dim and at
// input resolution, then combines them dim by dim with ATen's own weights. 'area' is adaptive
// average pooling.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/moments.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/finer_layout.h"
#include "shardfield/spec/resample.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;
using spec::Cut;
using spec::Layout;
using spec::ResampleMode;
using spec::Taps;
using tensor::is_sharded;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

using Scale = std::optional<double>;

/// Local rows and weights of one dim, tap after tap.
struct TapTensors {
  Tensor index;           ///< (width, outputs): row each tap reads
  Tensor backward_index;  ///< row each tap's gradient goes to
  Tensor weight;          ///< (width, outputs); undefined: one tap of weight 1
  int64_t dim = 0;
  int64_t num_rows = 0;
};

Tensor along(const Tensor& weight, const Tensor& like, int64_t dim) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[dim] = weight.size(0);
  return weight.view(shape);
}

/// Sum over the taps of weight * row.
Tensor combine(const Tensor& rows, const TapTensors& t) {
  Tensor out = rows.index_select(t.dim, t.index[0]);
  if (!t.weight.defined()) return out;
  out.mul_(along(t.weight[0], rows, t.dim));
  for (int64_t k = 1; k < t.index.size(0); ++k)
    out.addcmul_(rows.index_select(t.dim, t.index[k]), along(t.weight[k], rows, t.dim));
  return out;
}

/// Its transpose.
Tensor spread(const Tensor& grad, const TapTensors& t) {
  auto sizes = grad.sizes().vec();
  sizes[t.dim] = t.num_rows;
  Tensor rows = grad.new_zeros(sizes);
  for (int64_t k = 0; k < t.backward_index.size(0); ++k) {
    rows.index_add_(t.dim, t.backward_index[k],
                    t.weight.defined() ? grad * along(t.weight[k], grad, t.dim) : grad);
  }
  return rows;
}

/// combine() or, if `transposed`, spread(); each is the other's backward. The rows gradients go to
/// may be others than those read: ATen's nearest backward kernels on the CPU look rows up by
/// another rule than the forward ones, and the serial gradient is what must come out.
struct TapsFn : Function<TapsFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& in, const TapTensors& t,
                        bool transposed) {
    ctx->saved_data["index"] = t.index;
    ctx->saved_data["backward_index"] = t.backward_index;
    ctx->saved_data["weight"] = t.weight;
    ctx->saved_data["dim"] = t.dim;
    ctx->saved_data["rows"] = t.num_rows;
    ctx->saved_data["transposed"] = transposed;
    return transposed ? spread(in, t) : combine(in, t);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    auto& saved = ctx->saved_data;
    const TapTensors t{saved["index"].toTensor(), saved["backward_index"].toTensor(),
                       saved["weight"].toTensor(), saved["dim"].toInt(), saved["rows"].toInt()};
    const bool transposed = !saved["transposed"].toBool();
    return {apply_taps(grads[0], t, transposed), {}, {}};
  }
  static Tensor apply_taps(const Tensor& in, const TapTensors& t, bool transposed) {
    if (comm::records_grad(in)) return TapsFn::apply(in, t, transposed);
    return transposed ? spread(in, t) : combine(in, t);
  }
};

/// One dim of an interpolation on this rank.
struct ResampledDim {
  int64_t dim = 0;
  Taps taps;
  Taps backward_taps;     ///< nearest modes only: rows that the gradient goes to
  spec::Range outputs;    ///< own, global
  int64_t first_row = 0;  ///< global number of the first local row
  int64_t num_rows = 0;   ///< local rows
};

/// Local rows that own outputs read: (width, outputs).
Tensor local_index(const Taps& taps, const ResampledDim& d, const Tensor& like) {
  std::vector<int64_t> index;
  for (int64_t tap = 0; tap < taps.width; ++tap)
    for (int64_t o = d.outputs.begin; o < d.outputs.end; ++o)
      index.push_back(taps.index[static_cast<size_t>(o * taps.width + tap)] - d.first_row);
  return index_tensor(index, like).view({taps.width, d.outputs.size()});
}

TapTensors tap_tensors(const ResampledDim& d, const Tensor& rows) {
  TapTensors t;
  t.dim = d.dim;
  t.num_rows = d.num_rows;
  t.index = local_index(d.taps, d, rows);
  if (d.backward_taps.width > 0) {
    t.backward_index = local_index(d.backward_taps, d, rows);
    return t;
  }
  t.backward_index = t.index;
  std::vector<double> weights;
  for (int64_t tap = 0; tap < d.taps.width; ++tap)
    for (int64_t o = d.outputs.begin; o < d.outputs.end; ++o)
      weights.push_back(d.taps.weights[static_cast<size_t>(o * d.taps.width + tap)]);
  t.weight = at::tensor(weights, at::kDouble).view(t.index.sizes()).to(rows.options());
  return t;
}

bool is_identity(const ResampledDim& d) {
  for (const Taps* taps : {&d.taps, &d.backward_taps})
    for (int64_t o = 0; o < taps->num_outputs; ++o)
      for (int64_t t = 0; t < taps->width; ++t)
        if (taps->index[static_cast<size_t>(o * taps->width + t)] != o) return false;
  return d.taps.num_rows == d.taps.num_outputs;
}

/// What the user asked for, spatial dims only.
struct Resampling {
  const char* op;
  ResampleMode mode;
  bool align_corners = false;
  bool antialias = false;
  std::vector<int64_t> out;
  std::vector<Scale> scales;

  bool is_nearest() const {
    return mode == ResampleMode::kNearest || mode == ResampleMode::kNearestExact;
  }
};

spec::ResampleOptions options_of(const Resampling& r, const Tensor& x, size_t i) {
  spec::ResampleOptions options;
  options.mode = r.mode;
  options.align_corners = r.align_corners;
  options.antialias = r.antialias;
  options.scale_factor = r.scales[i];
  options.single_precision = x.scalar_type() != at::kDouble;
  return options;
}

std::vector<ResampledDim> resampled_dims(const Resampling& r, const Tensor& x) {
  const size_t n = r.out.size();
  const bool on_cpu = x.device().is_cpu();
  const auto format = n == 3 ? at::MemoryFormat::ChannelsLast3d : at::MemoryFormat::ChannelsLast;
  const bool last = n > 1 && x.is_contiguous(format);
  std::vector<ResampledDim> dims(n);
  for (size_t i = 0; i < n; ++i) {
    ResampledDim& d = dims[i];
    d.dim = static_cast<int64_t>(i) + 2;
    auto options = options_of(r, x, i);
    options.float_nearest =
        r.is_nearest() && (!on_cpu || spec::uses_float_nearest(r.out, x.size(1), last));
    d.taps = spec::resample_taps(x.size(d.dim), r.out[i], options);
    options.float_nearest = true;
    d.backward_taps =
        r.is_nearest() ? spec::resample_taps(x.size(d.dim), r.out[i], options) : Taps();
    d.outputs = {0, r.out[i]};
    d.num_rows = x.size(d.dim);
  }
  return dims;
}

void check_resampling(const Resampling& r, const Tensor& x) {
  const auto n = static_cast<int64_t>(r.out.size());
  SHARDFIELD_CHECK(x.dim() == n + 2, r.op, "expected a ", n + 2, "D input (batch, channels, ",
                   "spatial dims) and ", n, " output sizes, got ", tensor::describe(x));
  for (int64_t i = 0; i < n; ++i)
    SHARDFIELD_CHECK(x.size(i + 2) > 0 && r.out[i] > 0, r.op,
                     "Input and output sizes should be greater than 0, but got ",
                     tensor::describe(x), " and output sizes ", r.out);
}

/// Fetches the rows this rank needs along every cut spatial dim; fills in where they lie.
Tensor fetch_sources(const Tensor& x, std::vector<ResampledDim>& dims,
                     std::map<int, std::vector<int64_t>>& piece_sizes) {
  const Layout& layout = tensor::layout_of(x);
  Tensor piece = tensor::local(x);
  for (size_t c = 0; c < layout.cuts().size(); ++c) {
    const Cut& cut = layout.cuts()[c];
    if (cut.dim < 2) continue;
    ResampledDim& d = dims[cut.dim - 2];
    // Upwards again: cut as the finer tensor was, which a skip connection will bring.
    const auto finer = spec::finer_sizes(layout, c, d.taps.num_outputs);
    const auto pieces = finer.empty() ? spec::plan_resample(cut.sizes, d.taps)
                                      : spec::plan_resample_to(finer, d.taps);
    std::vector<spec::Range> needed;
    for (const auto& p : pieces) {
      spec::Range rows = p.inputs;
      if (d.backward_taps.width > 0 && !p.outputs.empty()) {
        const spec::Range more = d.backward_taps.reach(p.outputs);
        rows = {std::min(rows.begin, more.begin), std::max(rows.end, more.end)};
      }
      needed.push_back(rows);
      piece_sizes[cut.dim].push_back(p.outputs.size());
    }
    const int own = layout.piece(c);
    d.outputs = pieces[own].outputs;
    d.first_row = needed[own].begin;
    d.num_rows = needed[own].size();
    piece = fetch_rows(piece, layout, c, needed);
  }
  return piece;
}

/// Trailing spatial dims that no rank shares, which the stock op of fewer dims can do at once.
size_t num_stock_dims(const Resampling& r, const Layout& layout) {
  if (r.mode != ResampleMode::kLinear || r.antialias) return 0;
  const size_t n = r.out.size();
  size_t whole = 0;
  while (whole < n - 1 && !layout.is_cut(static_cast<int>(n + 1 - whole))) ++whole;
  return whole;
}

/// Linear interpolation of the last dims; the spatial dims before them count as channels.
Tensor resample_last_dims(const Tensor& x, const Resampling& r, size_t whole) {
  if (whole == 0) return x;
  const size_t n = r.out.size();
  const int64_t first = x.dim() - static_cast<int64_t>(whole);
  const std::vector<int64_t> out(r.out.end() - static_cast<int64_t>(whole), r.out.end());
  const Tensor folded = x.flatten(1, first - 1);
  const Tensor done =
      whole == 1
          ? at::upsample_linear1d(folded, out, r.align_corners, r.scales[n - 1])
          : at::upsample_bilinear2d(folded, out, r.align_corners, r.scales[n - 2], r.scales[n - 1]);
  auto sizes = x.sizes().vec();
  std::copy(out.begin(), out.end(), sizes.begin() + first);
  return done.view(sizes);
}

template <class Stock>
Tensor resample(const Tensor& input, const Resampling& r, Stock stock) {
  check_resampling(r, input);
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return stock(x);
  const Layout& layout = tensor::layout_of(x);
  // Stock rounds 8-bit images by rules of its own.
  if (!at::isFloatingType(x.scalar_type()) && !r.is_nearest()) {
    std::vector<int> kept(x.dim(), -1);
    kept[0] = 0;
    kept[1] = 1;
    return tensor::scatter_like(stock(tensor::gather(x)), spec::renumber(layout, kept));
  }
  auto sizes = x.sizes().vec();
  std::copy(r.out.begin(), r.out.end(), sizes.begin() + 2);
  if (layout.is_alone())
    return wrap_in_format_of(x, stock(tensor::local(x)), layout_when_alone(layout, sizes), sizes);
  std::vector<ResampledDim> dims = resampled_dims(r, x);
  std::map<int, std::vector<int64_t>> piece_sizes;
  Tensor piece = fetch_sources(x, dims, piece_sizes);
  const Layout* out_layout = with_piece_sizes(layout, piece_sizes);
  const auto own_sizes = out_layout->local_sizes(sizes.data(), static_cast<int>(x.dim()));
  Tensor out;
  const bool only_batch = layout.cuts().size() == 1 && layout.cuts()[0].dim == 0;
  if (c10::multiply_integers(own_sizes) == 0) {
    out = empty_result(piece, own_sizes);
  } else if (only_batch) {
    out = stock(piece);
  } else {
    const auto type = piece.scalar_type();
    const bool half = !r.is_nearest() && (type == at::kHalf || type == at::kBFloat16);
    out = half ? piece.to(at::kFloat) : piece;
    const size_t whole = num_stock_dims(r, layout);
    dims.resize(dims.size() - whole);
    // What shrinks comes first.
    std::stable_sort(dims.begin(), dims.end(), [](const ResampledDim& a, const ResampledDim& b) {
      return a.outputs.size() * b.num_rows < b.outputs.size() * a.num_rows;
    });
    for (const ResampledDim& d : dims)
      if (!is_identity(d)) out = TapsFn::apply_taps(out, tap_tensors(d, out), false);
    out = resample_last_dims(out, r, whole);
    if (half) out = out.to(type);
    if (out.is_alias_of(tensor::piece_of(x))) out = out.clone();
  }
  return wrap_in_format_of(x, out, out_layout, sizes);
}

#define SHARDFIELD_OUT C10_AS_INTARRAYREF_SLOW(size).vec()

// Nearest modes: (size, scale per dim).
#define SHARDFIELD_NEAREST(name, mode, parameters, ...)                                          \
  Tensor name##_sharded(const Tensor& x, SymIntArrayRef size, parameters) {                      \
    return resample(x, {#name, ResampleMode::mode, false, false, SHARDFIELD_OUT, {__VA_ARGS__}}, \
                    [&](const Tensor& t) { return at::name##_symint(t, size, __VA_ARGS__); });   \
  }
// Linear and cubic modes: (size, align_corners, scale per dim).
#define SHARDFIELD_WEIGHTED(name, mode, antialias, parameters, ...)                         \
  Tensor name##_sharded(const Tensor& x, SymIntArrayRef size, bool corners, parameters) {   \
    return resample(                                                                        \
        x, {#name, ResampleMode::mode, corners, antialias, SHARDFIELD_OUT, {__VA_ARGS__}},  \
        [&](const Tensor& t) { return at::name##_symint(t, size, corners, __VA_ARGS__); }); \
  }
#define SHARDFIELD_SCALES_1 Scale w
#define SHARDFIELD_SCALES_2 Scale h, Scale w
#define SHARDFIELD_SCALES_3 Scale d, Scale h, Scale w

SHARDFIELD_NEAREST(upsample_nearest1d, kNearest, SHARDFIELD_SCALES_1, w)
SHARDFIELD_NEAREST(upsample_nearest2d, kNearest, SHARDFIELD_SCALES_2, h, w)
SHARDFIELD_NEAREST(upsample_nearest3d, kNearest, SHARDFIELD_SCALES_3, d, h, w)
SHARDFIELD_NEAREST(_upsample_nearest_exact1d, kNearestExact, SHARDFIELD_SCALES_1, w)
SHARDFIELD_NEAREST(_upsample_nearest_exact2d, kNearestExact, SHARDFIELD_SCALES_2, h, w)
SHARDFIELD_NEAREST(_upsample_nearest_exact3d, kNearestExact, SHARDFIELD_SCALES_3, d, h, w)
SHARDFIELD_WEIGHTED(upsample_linear1d, kLinear, false, SHARDFIELD_SCALES_1, w)
SHARDFIELD_WEIGHTED(upsample_bilinear2d, kLinear, false, SHARDFIELD_SCALES_2, h, w)
SHARDFIELD_WEIGHTED(upsample_trilinear3d, kLinear, false, SHARDFIELD_SCALES_3, d, h, w)
SHARDFIELD_WEIGHTED(upsample_bicubic2d, kCubic, false, SHARDFIELD_SCALES_2, h, w)
SHARDFIELD_WEIGHTED(_upsample_bilinear2d_aa, kLinear, true, SHARDFIELD_SCALES_2, h, w)
SHARDFIELD_WEIGHTED(_upsample_bicubic2d_aa, kCubic, true, SHARDFIELD_SCALES_2, h, w)

}  // namespace

SHARDFIELD_OPS(interpolate) {
  table.composed("aten::upsample_nearest1d", TORCH_FN(upsample_nearest1d_sharded));
  table.composed("aten::upsample_nearest2d", TORCH_FN(upsample_nearest2d_sharded));
  table.composed("aten::upsample_nearest3d", TORCH_FN(upsample_nearest3d_sharded));
  table.composed("aten::_upsample_nearest_exact1d", TORCH_FN(_upsample_nearest_exact1d_sharded));
  table.composed("aten::_upsample_nearest_exact2d", TORCH_FN(_upsample_nearest_exact2d_sharded));
  table.composed("aten::_upsample_nearest_exact3d", TORCH_FN(_upsample_nearest_exact3d_sharded));
  table.composed("aten::upsample_linear1d", TORCH_FN(upsample_linear1d_sharded));
  table.composed("aten::upsample_bilinear2d", TORCH_FN(upsample_bilinear2d_sharded));
  table.composed("aten::upsample_trilinear3d", TORCH_FN(upsample_trilinear3d_sharded));
  table.composed("aten::upsample_bicubic2d", TORCH_FN(upsample_bicubic2d_sharded));
  table.composed("aten::_upsample_bilinear2d_aa", TORCH_FN(_upsample_bilinear2d_aa_sharded));
  table.composed("aten::_upsample_bicubic2d_aa", TORCH_FN(_upsample_bicubic2d_aa_sharded));
}

}  // namespace shardfield::ops
