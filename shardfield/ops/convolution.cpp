// Convolution and transposed convolution, 1-, 2- and 3-D. A cut spatial dim takes the rows that its
// windows read from the neighbours, aligned to the global output grid; the result's pieces follow
// from it.

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/convolution_composed.h"
#include "shardfield/ops/convolution_lean.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/moments.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/finer_layout.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using OptTensor = std::optional<Tensor>;

std::vector<int64_t> numbers(const char* op, const char* name, SymIntArrayRef values,
                             int64_t dims) {
  const at::IntArrayRef given = C10_AS_INTARRAYREF_SLOW(values);
  SHARDFIELD_CHECK(given.size() == 1 || static_cast<int64_t>(given.size()) == dims, op, "expected ",
                   name, " to have 1 or ", dims, " entries, got ", given,
                   "; give one per spatial dim");
  if (given.size() == 1) return std::vector<int64_t>(dims, given[0]);
  return given.vec();
}

ConvSettings settings_of(const char* op, const Tensor& weight, SymIntArrayRef stride,
                         SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
                         SymIntArrayRef output_padding, const SymInt& groups) {
  const int64_t dims = weight.dim() - 2;
  SHARDFIELD_CHECK(dims >= 1, op, "expected a weight of 3 or more dims, got ", weight.sizes(),
                   "; give (out, in, kernel...)");
  ConvSettings s;
  s.stride = numbers(op, "stride", stride, dims);
  s.dilation = numbers(op, "dilation", dilation, dims);
  s.pad_lo = numbers(op, "padding", padding, dims);
  s.pad_hi = s.pad_lo;
  s.output_padding = transposed ? numbers(op, "output_padding", output_padding, dims)
                                : std::vector<int64_t>(dims, 0);
  s.transposed = transposed;
  s.groups = groups.guard_int(__FILE__, __LINE__);
  return s;
}

Tensor whole(const char* op, const Tensor& t) {
  if (!tensor::is_sharded(t)) return t;
  dispatch::report_fallback(std::string("aten::") + op + " (sharded weight)", t);
  return tensor::gather(t);
}

Tensor convolve(const char* op, const Tensor& x, const Tensor& weight_arg,
                const OptTensor& bias_arg, const ConvSettings& settings) {
  const Tensor weight = whole(op, weight_arg);
  const OptTensor bias = bias_arg.has_value() ? OptTensor(whole(op, *bias_arg)) : bias_arg;
  if (!tensor::is_sharded(x)) return convolve_plain(x, weight, bias, settings);
  const spec::Layout& given = tensor::layout_of(x);
  // Merged rows lie scattered over the ranks: they move to one block per rank, nobody gets all.
  if (!given.is_simple(x.sizes().data()))
    return convolve(op, with_simple_cuts(x), weight, bias, settings);
  const spec::Layout* layout =
      x.dim() == weight.dim() ? convolvable_layout(given, x.sizes(), settings.groups) : &given;
  if (layout != &given)
    return convolve(op, tensor::redistribute(x, layout), weight, bias, settings);
  const auto plan = plan_convolution(op, *layout, x.sizes(), weight.sizes(), settings);
  if (!settings.transposed) spec::remember_finer(plan->output, layout);
  if (plan->channels != ConvPlan::Channels::kWhole)
    return convolve_composed(x, weight, bias, *plan);
  return convolve_lean(x, weight, bias, plan);
}

/// No other rank holds a part of x, and its channels, which the weight shares, are not cut even in
/// name.
bool runs_alone(const Tensor& x, const Tensor& weight) {
  if (!tensor::is_sharded(x) || tensor::is_sharded(weight) || x.dim() != weight.dim()) return false;
  const spec::Layout& layout = tensor::layout_of(x);
  return layout.is_alone() && !layout.is_cut(1) && layout.is_simple(x.sizes().data());
}

/// Nothing to exchange: PyTorch's own formula, without a node of ours, and its kernel on the piece.
Tensor convolve_alone(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                      SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                      bool transposed, SymIntArrayRef output_padding, const SymInt& groups) {
  if (tensor::records_grad(x) || tensor::records_grad(weight) ||
      tensor::records_grad(bias.value_or(Tensor()))) {
    return dispatch::call_formula<at::_ops::convolution>(x, weight, bias, stride, padding, dilation,
                                                         transposed, output_padding, groups);
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  const Tensor y = at::convolution_symint(tensor::piece_of(x), weight, bias, stride, padding,
                                          dilation, transposed, output_padding, groups);
  return tensor::make_sharded_strided(y, layout_when_alone(tensor::layout_of(x), y.sizes()),
                                      y.sizes(), y.strides());
}

Tensor convolution(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                   SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                   bool transposed, SymIntArrayRef output_padding, SymInt groups) {
  const char* op = "convolution";
  if (runs_alone(x, weight) && (!bias.has_value() || !tensor::is_sharded(*bias)))
    return convolve_alone(x, weight, bias, stride, padding, dilation, transposed, output_padding,
                          groups);
  return convolve(
      op, x, weight, bias,
      settings_of(op, weight, stride, padding, dilation, transposed, output_padding, groups));
}

Tensor convolution_with_flags(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                              SymIntArrayRef stride, SymIntArrayRef padding,
                              SymIntArrayRef dilation, bool transposed,
                              SymIntArrayRef output_padding, SymInt groups, bool /*benchmark*/,
                              bool /*deterministic*/, bool /*cudnn_enabled*/, bool /*allow_tf32*/) {
  return convolution(x, weight, bias, stride, padding, dilation, transposed, output_padding,
                     std::move(groups));
}

/// padding = 'same' or 'valid'. An odd total puts the extra row behind, as PyTorch does.
Tensor conv_padded(const Tensor& input, const Tensor& weight, const OptTensor& bias,
                   SymIntArrayRef stride, c10::string_view padding, SymIntArrayRef dilation,
                   SymInt groups) {
  const char* op = "conv";
  const SymInt zero = 0;
  ConvSettings s = settings_of(op, weight, stride, SymIntArrayRef(&zero, 1), dilation, false,
                               SymIntArrayRef(&zero, 1), groups);
  SHARDFIELD_CHECK(padding == "same" || padding == "valid", op,
                   "expected padding 'same' or 'valid', got '", padding,
                   "'; give one of them or numbers");
  if (padding == "same") {
    for (int d = 0; d < s.num_spatial(); ++d) {
      SHARDFIELD_CHECK(s.stride[d] == 1, op,
                       "padding='same' is not supported for strided convolutions, got stride ",
                       at::IntArrayRef(s.stride), "; give the padding in numbers");
      const int64_t total = s.dilation[d] * (weight.size(d + 2) - 1);
      s.pad_lo[d] = total / 2;
      s.pad_hi[d] = total - s.pad_lo[d];
    }
  }
  const bool batched = input.dim() == weight.dim();
  const Tensor y = convolve(op, batched ? input : input.unsqueeze(0), weight, bias, s);
  return batched ? y : y.squeeze(0);
}

/// The gradients where no other rank holds a part of x.
std::tuple<Tensor, Tensor, Tensor> backward_alone(const Tensor& grad, const Tensor& x,
                                                  const Tensor& weight,
                                                  at::OptionalSymIntArrayRef bias_sizes,
                                                  SymIntArrayRef stride, SymIntArrayRef padding,
                                                  SymIntArrayRef dilation, bool transposed,
                                                  SymIntArrayRef output_padding, SymInt groups,
                                                  std::array<bool, 3> mask) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  auto [dx, dw, db] = at::convolution_backward_symint(
      tensor::is_sharded(grad) ? tensor::piece_of(grad) : grad, tensor::piece_of(x), weight,
      bias_sizes, stride, padding, dilation, transposed, output_padding, groups, mask);
  if (dx.defined())
    dx = tensor::make_sharded_strided(dx, &tensor::layout_of(x), x.sizes(), dx.strides());
  return {dx, dw, db};
}

/// For callers of the derivative op itself, and the backward of a convolution that runs alone.
std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight,
    at::OptionalSymIntArrayRef bias_sizes, SymIntArrayRef stride, SymIntArrayRef padding,
    SymIntArrayRef dilation, bool transposed, SymIntArrayRef output_padding, SymInt groups,
    std::array<bool, 3> mask) {
  const bool differentiable =
      tensor::records_grad(grad) || tensor::records_grad(x) || tensor::records_grad(weight);
  if (!differentiable && runs_alone(x, weight))
    return backward_alone(grad, x, weight, bias_sizes, stride, padding, dilation, transposed,
                          output_padding, groups, mask);
  // A second derivative may bring a sharded gradient to a convolution of plain tensors.
  if (!tensor::is_sharded(x))
    return at::convolution_backward_symint(tensor::gather(grad), x, whole("convolution", weight),
                                           bias_sizes, stride, padding, dilation, transposed,
                                           output_padding, std::move(groups), mask);
  // Below autograd too: what is built here is differentiated at once.
  const c10::impl::LocalDispatchKeySet keys = c10::impl::tls_local_dispatch_key_set();
  const c10::impl::ForceDispatchKeyGuard recording(
      keys.included_, keys.excluded_ - c10::autograd_dispatch_keyset_with_ADInplaceOrView);
  const at::AutoGradMode record(true);
  const auto input = [&](const Tensor& t, bool wanted) {
    if (differentiable && t.requires_grad()) return t;
    return wanted ? t.detach().requires_grad_() : t.detach();
  };
  const Tensor xs = input(x, mask[0]);
  const Tensor ws = input(weight, mask[1]);
  OptTensor bs;
  if (mask[2]) {
    const int64_t channels = transposed ? weight.size(1) * groups.expect_int() : weight.size(0);
    TORCH_INTERNAL_ASSERT(!bias_sizes.has_value() || bias_sizes->size() <= 1);
    bs = at::zeros({channels}, grad.options().device(weight.device())).requires_grad_();
  }
  const char* op = "convolution";
  const Tensor y =
      convolve(op, xs, ws, bs,
               settings_of(op, ws, stride, padding, dilation, transposed, output_padding, groups));
  torch::autograd::variable_list inputs;
  if (mask[0]) inputs.push_back(xs);
  if (mask[1]) inputs.push_back(ws);
  if (mask[2]) inputs.push_back(*bs);
  std::array<Tensor, 3> out;
  if (inputs.empty()) return {};
  const auto grads = torch::autograd::grad({y}, inputs, {differentiable ? grad : grad.detach()},
                                           std::nullopt, differentiable);
  size_t next = 0;
  for (size_t i = 0; i < 3; ++i)
    if (mask[i]) out[i] = grads[next++];
  return {out[0], out[1], out[2]};
}

}  // namespace

SHARDFIELD_OPS(convolution) {
  table.composed("aten::convolution", TORCH_FN(convolution));
  table.composed("aten::convolution_overrideable", TORCH_FN(convolution));
  table.composed("aten::_convolution", TORCH_FN(convolution_with_flags));
  table.composed("aten::convolution_backward", TORCH_FN(convolution_backward));
  table.composed("aten::conv1d.padding", TORCH_FN(conv_padded));
  table.composed("aten::conv2d.padding", TORCH_FN(conv_padded));
  table.composed("aten::conv3d.padding", TORCH_FN(conv_padded));
}

}  // namespace shardfield::ops
