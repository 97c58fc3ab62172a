#include "shardfield/ops/convolution_composed.h"

#include <ATen/ATen.h>

#include "shardfield/exchange/rows.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

bool has(const OptTensor& t) {
  return t.has_value() && t->defined();
}

/// Adds the same number of rows on both sides by the op itself, the rest by a pad.
Tensor pad_unevenly(const Tensor& x, std::vector<int64_t>& lo, const std::vector<int64_t>& hi) {
  const size_t n = lo.size();
  std::vector<int64_t> extra(2 * n, 0);
  bool any = false;
  for (size_t d = 0; d < n; ++d) {
    const int64_t both = x.size(static_cast<int64_t>(d) + 2) == 0 ? 0 : std::min(lo[d], hi[d]);
    extra[2 * (n - 1 - d)] = lo[d] - both;
    extra[2 * (n - 1 - d) + 1] = hi[d] - both;
    any |= lo[d] != both || hi[d] != both;
    lo[d] = both;
  }
  return any ? at::constant_pad_nd(x, extra, 0) : x;
}

/// A result that no element decides. A convolution of dummy rows stands behind it, so that its
/// derivatives of every order lead to the same inputs as elsewhere and the exchanges run there.
Tensor unreached(const ConvPlan& plan, const Tensor& rows, const Tensor& weight,
                 const OptTensor& bias) {
  const ConvSettings& s = plan.settings;
  const std::vector<int64_t> one(weight.dim(), 1);
  const Tensor w = grown_to(weight, one);
  std::vector<int64_t> least = one;
  least[1] = w.size(s.transposed ? 0 : 1);
  for (int64_t d = 2; d < w.dim() && !s.transposed; ++d)
    least[d] = s.dilation[d - 2] * (w.size(d) - 1) + 1;
  const Tensor x = grown_to(rows, least).narrow(1, 0, least[1]);
  const std::vector<int64_t> none(s.num_spatial(), 0);
  const int64_t channels = w.size(s.transposed ? 1 : 0);
  const OptTensor b =
      has(bias) ? OptTensor(grown_to(*bias, {channels}).narrow(0, 0, channels)) : bias;
  const Tensor y = at::convolution(x, w, b, s.stride, none, s.dilation, s.transposed, none, 1);
  return empty_result_like(y, plan.output_piece);
}

Tensor with_bias(const Tensor& y, const OptTensor& bias) {
  if (!has(bias)) return y;
  std::vector<int64_t> shape(y.dim(), 1);
  shape[1] = bias->size(0);
  return y + bias->view(shape);
}

Tensor convolve_rows(const Tensor& rows, const Tensor& weight, const OptTensor& bias,
                     const ConvPlan& plan) {
  const ConvSettings& s = plan.settings;
  std::vector<int64_t> lo = s.pad_lo, hi = s.pad_hi;
  for (const ConvDim& d : plan.dims) {
    lo[d.dim - 2] = d.pad_lo;
    hi[d.dim - 2] = d.pad_hi;
  }
  const Tensor padded = pad_unevenly(rows, lo, hi);
  return at::convolution(padded, weight, bias, s.stride, lo, s.dilation, false, s.output_padding,
                         plan.local_groups);
}

Tensor transpose_rows(const Tensor& rows, const Tensor& weight, const OptTensor& bias,
                      const ConvPlan& plan) {
  const ConvSettings& s = plan.settings;
  std::vector<int64_t> padding = s.pad_lo, output_padding = s.output_padding;
  std::vector<int64_t> unreached_rows(2 * s.num_spatial(), 0);
  bool any = false;
  for (const ConvDim& d : plan.dims) {
    padding[d.dim - 2] = 0;
    output_padding[d.dim - 2] = 0;
    const size_t at = 2 * (s.num_spatial() + 1 - d.dim);
    unreached_rows[at] = d.pad_lo;
    unreached_rows[at + 1] = d.pad_hi;
    any |= d.pad_lo > 0 || d.pad_hi > 0;
  }
  Tensor y = at::convolution(rows, weight, any ? OptTensor() : bias, s.stride, padding, s.dilation,
                             true, output_padding, plan.local_groups);
  for (const ConvDim& d : plan.dims)
    y = y.narrow(d.dim, d.crop_lo, y.size(d.dim) - d.crop_lo - d.crop_hi);
  if (!any) return y.contiguous(y.suggest_memory_format());
  return with_bias(at::constant_pad_nd(y, unreached_rows, 0), bias);
}

Tensor convolve_piece(const Tensor& rows, const Tensor& weight, const OptTensor& bias,
                      const ConvPlan& plan) {
  const bool no_output = std::any_of(plan.output_piece.begin(), plan.output_piece.end(),
                                     [](int64_t n) { return n == 0; });
  const bool no_channel = rows.size(1) == 0;
  if (no_output || no_channel || (plan.settings.transposed && rows.numel() == 0)) {
    const Tensor y = unreached(plan, rows, weight, bias);
    return no_output ? y : with_bias(y, bias);
  }
  return plan.settings.transposed ? transpose_rows(rows, weight, bias, plan)
                                  : convolve_rows(rows, weight, bias, plan);
}

}  // namespace

at::MemoryFormat conv_format(const Tensor& x, const Tensor& weight) {
  // The 3-D kernels for double on the CPU know one order only.
  if (x.dim() == 5 && x.device().is_cpu() && x.scalar_type() == at::kDouble)
    return at::MemoryFormat::Contiguous;
  const auto format = x.suggest_memory_format();
  if (format != at::MemoryFormat::Contiguous || weight.dim() != x.dim()) return format;
  return weight.suggest_memory_format();
}

Tensor convolve_plain(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                      const ConvSettings& s) {
  std::vector<int64_t> lo = s.pad_lo;
  const Tensor padded = pad_unevenly(x, lo, s.pad_hi);
  return at::convolution(padded, weight, bias, s.stride, lo, s.dilation, s.transposed,
                         s.output_padding, s.groups);
}

Tensor convolve_composed(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                         const ConvPlan& plan) {
  using Channels = ConvPlan::Channels;
  const spec::Layout& layout = *plan.input;
  Tensor rows = tensor::local(x);
  for (const ConvDim& d : plan.dims)
    rows = exchange::exchange_rows(rows, exchange::row_exchange(layout, d.cut, d.inputs));
  Tensor w = tensor::enter(weight, layout);
  OptTensor b = plan.channels == Channels::kPartial ? OptTensor() : tensor::enter(bias, layout);
  if (plan.channels != Channels::kWhole) {
    const bool inputs = plan.channels == Channels::kPartial && !plan.settings.transposed;
    w = w.narrow(inputs ? 1 : 0, plan.weight_rows.begin, plan.weight_rows.size());
    if (has(b)) b = b->narrow(0, plan.bias_rows.begin, plan.bias_rows.size());
  }
  Tensor y = convolve_piece(rows, w, b, plan);
  if (plan.channels == Channels::kPartial) {
    y = tensor::reduce_sum(y, layout.mesh(), layout.cuts()[plan.channel_cut].axes);
    y = with_bias(y, plan.output ? tensor::enter(bias, *plan.output) : bias);
    y = y.contiguous(conv_format(x, weight));
  }
  return tensor::wrap(y, plan.output, plan.output_sizes, conv_format(x, weight));
}

}  // namespace shardfield::ops
