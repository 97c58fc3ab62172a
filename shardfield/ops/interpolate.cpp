// Interpolation. Separable: every rank fetches the rows its outputs read, once per cut dim and at
// input resolution, then combines them dim by dim with ATen's own weights. 'area' is adaptive
// average pooling.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
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

/// Picks rows; backward adds at other rows. ATen's nearest backward kernels on the CPU look rows up
/// by another rule than the forward ones, and the serial gradient is what must come out.
struct PickRowsFn : Function<PickRowsFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& in, const Tensor& pick,
                        const Tensor& add, int64_t dim, int64_t num_rows, bool adjoint) {
    ctx->saved_data["dim"] = dim;
    ctx->saved_data["rows"] = num_rows;
    ctx->saved_data["adjoint"] = adjoint;
    ctx->save_for_backward({pick, add});
    return run(in, pick, add, dim, num_rows, adjoint);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const int64_t dim = ctx->saved_data["dim"].toInt();
    const int64_t num_rows = ctx->saved_data["rows"].toInt();
    const bool adjoint = !ctx->saved_data["adjoint"].toBool();
    const Tensor grad =
        comm::records_grad(grads[0])
            ? PickRowsFn::apply(grads[0], saved[0], saved[1], dim, num_rows, adjoint)
            : run(grads[0], saved[0], saved[1], dim, num_rows, adjoint);
    return {grad, {}, {}, {}, {}, {}};
  }
  static Tensor run(const Tensor& in, const Tensor& pick, const Tensor& add, int64_t dim,
                    int64_t num_rows, bool adjoint) {
    if (!adjoint) return in.index_select(dim, pick);
    auto sizes = in.sizes().vec();
    sizes[dim] = num_rows;
    return in.new_zeros(sizes).index_add_(dim, add, in);
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

std::vector<int64_t> local_index(const Taps& taps, const ResampledDim& d, int64_t tap) {
  std::vector<int64_t> index;
  for (int64_t o = d.outputs.begin; o < d.outputs.end; ++o)
    index.push_back(taps.index[static_cast<size_t>(o * taps.width + tap)] - d.first_row);
  return index;
}

Tensor tap_weights(const ResampledDim& d, int64_t tap, const Tensor& rows) {
  std::vector<double> weights;
  for (int64_t o = d.outputs.begin; o < d.outputs.end; ++o)
    weights.push_back(d.taps.weights[static_cast<size_t>(o * d.taps.width + tap)]);
  std::vector<int64_t> shape(rows.dim(), 1);
  shape[d.dim] = d.outputs.size();
  return at::tensor(weights, at::kDouble).view(shape).to(rows.options());
}

Tensor nearest_rows(const Tensor& rows, const ResampledDim& d) {
  const auto pick = local_index(d.taps, d, 0);
  const auto add = local_index(d.backward_taps, d, 0);
  const Tensor pick_rows = index_tensor(pick, rows);
  if (pick == add || !comm::records_grad(rows)) return rows.index_select(d.dim, pick_rows);
  return PickRowsFn::apply(rows, pick_rows, index_tensor(add, rows), d.dim, d.num_rows, false);
}

/// Sum over the taps of weight * row. Saves weights and indices only.
Tensor weighted_rows(const Tensor& rows, const ResampledDim& d) {
  Tensor out;
  for (int64_t tap = 0; tap < d.taps.width; ++tap) {
    const Tensor index = index_tensor(local_index(d.taps, d, tap), rows);
    const Tensor term = rows.index_select(d.dim, index).mul(tap_weights(d, tap, rows));
    out = out.defined() ? out.add(term) : term;
  }
  return out;
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
    const auto pieces = spec::plan_resample(cut.sizes, d.taps);
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

template <class Stock>
Tensor resample(const Tensor& input, const Resampling& r, Stock stock) {
  check_resampling(r, input);
  const Tensor x = with_whole_dim_cuts(input);
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
    // What shrinks comes first.
    std::stable_sort(dims.begin(), dims.end(), [](const ResampledDim& a, const ResampledDim& b) {
      return a.outputs.size() * b.num_rows < b.outputs.size() * a.num_rows;
    });
    for (const ResampledDim& d : dims)
      if (!is_identity(d)) out = r.is_nearest() ? nearest_rows(out, d) : weighted_rows(out, d);
    if (half) out = out.to(type);
    if (out.is_alias_of(tensor::piece_of(x))) out = out.clone();
  }
  return tensor::wrap(out, out_layout, sizes, x.suggest_memory_format());
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
