// Statistics, norms and softmax in reproducible mode, written out of sums and elementwise ops,
// whose derivatives are again sums and elementwise ops.

#include <cmath>
#include <limits>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/ops/reproducible_form.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Scalar;
using at::Tensor;
using c10::SymIntArrayRef;
using OptTensor = std::optional<Tensor>;
using Dtype = std::optional<at::ScalarType>;

// Statistics and norms.

struct Moments {
  Tensor mean, centered, var;  // dims kept; var by `count - correction`
};
Moments moments_of(const Tensor& x, const std::vector<int64_t>& dims, double correction) {
  const Tensor mean = at::mean(x, dims, true);
  const Tensor centered = x - mean;
  const double count = std::max(static_cast<double>(count_of(x, dims)) - correction, 0.0);
  return {mean, centered, at::sum(centered * centered, dims, true) / count};
}

Tensor without(const Tensor& t, const std::vector<int64_t>& dims, bool keepdim) {
  return keepdim ? t : at::squeeze(t, dims);
}
std::tuple<Tensor, Tensor> variance_and_mean(const Tensor& x, OptionalIntArrayRef dims,
                                             const std::optional<Scalar>& correction,
                                             bool keepdim) {
  const auto reduced = wrapped(dims, x.dim());
  const Moments m = moments_of(x, reduced, correction.value_or(1).toDouble());
  return {without(m.var, reduced, keepdim), without(m.mean, reduced, keepdim)};
}
std::tuple<Tensor, Tensor> deviation_and_mean(const Tensor& x, OptionalIntArrayRef dims,
                                              const std::optional<Scalar>& correction,
                                              bool keepdim) {
  const auto [var, mean] = variance_and_mean(x, dims, correction, keepdim);
  return {at::sqrt(var), mean};
}
Tensor variance(const Tensor& x, OptionalIntArrayRef dims, const std::optional<Scalar>& correction,
                bool keepdim) {
  return std::get<0>(variance_and_mean(x, dims, correction, keepdim));
}
Tensor deviation(const Tensor& x, OptionalIntArrayRef dims, const std::optional<Scalar>& correction,
                 bool keepdim) {
  return at::sqrt(variance(x, dims, correction, keepdim));
}

/// The derivative at a zero vector is zero, as PyTorch has it.
Tensor vector_norm(const Tensor& x, const Scalar& ord, OptionalIntArrayRef dims, bool keepdim,
                   Dtype dtype) {
  const double p = ord.toDouble();
  const Tensor given = dtype ? x.to(*dtype) : x;
  const auto reduced = wrapped(dims, x.dim());
  if (p == 0 || std::isinf(p)) {
    const dispatch::OrdinaryArithmetic ordinary;
    return at::linalg_vector_norm(given, ord, reduced, keepdim);
  }
  const Tensor value = given.is_complex() ? given.abs() : given;
  if (p == 1) return at::sum(value.abs(), reduced, keepdim);
  const Tensor total = p == 2 ? at::sum(value * value, reduced, keepdim)
                              : at::sum(value.abs().pow(p), reduced, keepdim);
  const Tensor none = total.eq(0);
  const Tensor safe = total.masked_fill(none, 1);
  return (p == 2 ? safe.sqrt() : safe.pow(1 / p)).masked_fill(none, 0);
}
Tensor norm_scalar(const Tensor& x, const Scalar& p) {
  return vector_norm(x, p, std::nullopt, false, std::nullopt);
}
Tensor norm_dtype(const Tensor& x, const std::optional<Scalar>& p, at::ScalarType dtype) {
  return vector_norm(x, p.value_or(2), std::nullopt, false, dtype);
}
Tensor norm_dims(const Tensor& x, const std::optional<Scalar>& p, IntArrayRef dims, bool keepdim) {
  return vector_norm(x, p.value_or(2), dims, keepdim, std::nullopt);
}
Tensor norm_dims_dtype(const Tensor& x, const std::optional<Scalar>& p, IntArrayRef dims,
                       bool keepdim, at::ScalarType dtype) {
  return vector_norm(x, p.value_or(2), dims, keepdim, dtype);
}

/// Statistics of reduced precision are taken in float32.
Tensor widened(const Tensor& x) {
  const auto type = x.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? x.to(at::kFloat) : x;
}

Tensor along_channels(const Tensor& t, const Tensor& x) {
  std::vector<int64_t> sizes(x.dim(), 1);
  sizes[1] = -1;
  return t.reshape(sizes);
}
Tensor affine(const Tensor& x, const OptTensor& weight, const OptTensor& bias) {
  Tensor y = is_given(weight) ? x * *weight : x;
  return is_given(bias) ? y + *bias : y;
}
OptTensor channel_row(const OptTensor& t, const Tensor& x) {
  return is_given(t) ? OptTensor(along_channels(*t, x)) : std::nullopt;
}

void update_running(const OptTensor& running, const Tensor& value, double momentum) {
  if (!is_given(running)) return;
  const at::NoGradGuard no_grad;
  const Tensor& target = *running;
  const Tensor whole = tensor::gather(value.reshape(target.sizes()));
  target.copy_(target * (1 - momentum) + whole.to(target.scalar_type()) * momentum);
}

Tensor batch_normed(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                    const OptTensor& running_mean, const OptTensor& running_var, bool training,
                    double momentum, double eps, bool) {
  const Tensor wide = widened(x);
  Tensor centered, var;
  if (training) {
    std::vector<int64_t> dims = wrapped(std::nullopt, x.dim());
    dims.erase(dims.begin() + 1);
    const Moments m = moments_of(wide, dims, 0);
    centered = m.centered;
    var = m.var;
    const auto count = static_cast<double>(count_of(x, dims));
    update_running(running_mean, m.mean.detach(), momentum);
    update_running(running_var, m.var.detach() * (count / (count - 1)), momentum);
  } else {
    centered = wide - along_channels(*running_mean, x);
    var = along_channels(*running_var, x);
  }
  const Tensor normal = centered * (var + eps).rsqrt();
  return affine(normal, channel_row(weight, x), channel_row(bias, x)).to(x.scalar_type());
}

Tensor instance_norm(const Tensor& x, const OptTensor& weight, const OptTensor& bias,
                     const OptTensor& running_mean, const OptTensor& running_var, bool use_input,
                     double momentum, double eps, bool cudnn) {
  if (!use_input)
    return batch_normed(x, weight, bias, running_mean, running_var, false, momentum, eps, cudnn);
  std::vector<int64_t> dims = wrapped(std::nullopt, x.dim());
  dims.erase(dims.begin(), dims.begin() + 2);
  const Moments m = moments_of(widened(x), dims, 0);
  const auto count = static_cast<double>(count_of(x, dims));
  update_running(running_mean, at::mean(m.mean.detach(), 0), momentum);
  update_running(running_var, at::mean(m.var.detach(), 0) * (count / (count - 1)), momentum);
  const Tensor normal = m.centered * (m.var + eps).rsqrt();
  return affine(normal, channel_row(weight, x), channel_row(bias, x)).to(x.scalar_type());
}

Tensor group_norm(const Tensor& x, int64_t groups, const OptTensor& weight, const OptTensor& bias,
                  double eps, bool) {
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[1] /= groups;
  sizes.insert(sizes.begin() + 1, groups);
  const Tensor grouped = widened(x).reshape(sizes);
  std::vector<int64_t> dims = wrapped(std::nullopt, grouped.dim());
  dims.erase(dims.begin(), dims.begin() + 2);
  const Moments m = moments_of(grouped, dims, 0);
  const Tensor normal = (m.centered * (m.var + eps).rsqrt()).reshape(x.sizes());
  return affine(normal, channel_row(weight, x), channel_row(bias, x)).to(x.scalar_type());
}

std::vector<int64_t> last_dims(const Tensor& x, size_t count) {
  std::vector<int64_t> dims = wrapped(std::nullopt, x.dim());
  dims.erase(dims.begin(), dims.end() - static_cast<std::ptrdiff_t>(count));
  return dims;
}
Tensor layer_norm(const Tensor& x, SymIntArrayRef shape, const OptTensor& weight,
                  const OptTensor& bias, double eps, bool) {
  const Moments m = moments_of(widened(x), last_dims(x, shape.size()), 0);
  return affine(m.centered * (m.var + eps).rsqrt(), weight, bias).to(x.scalar_type());
}
Tensor rms_norm(const Tensor& x, SymIntArrayRef shape, const OptTensor& weight,
                std::optional<double> eps) {
  const Tensor wide = widened(x);
  const double smallest = wide.scalar_type() == at::kDouble ? std::numeric_limits<double>::epsilon()
                                                            : std::numeric_limits<float>::epsilon();
  const Tensor power = at::mean(wide * wide, last_dims(x, shape.size()), true);
  return affine(wide * (power + eps.value_or(smallest)).rsqrt(), weight, std::nullopt)
      .to(x.scalar_type());
}

// Softmax, at PrivateUse3.

Tensor softmax(const Tensor& x, int64_t dim, bool to_float) {
  const Tensor wide = to_float ? x.to(at::kFloat) : widened(x);
  const Tensor powers = at::exp(wide - at::amax(wide, dim, true));
  return (powers / at::sum(powers, dim, true)).to(to_float ? at::kFloat : x.scalar_type());
}
Tensor log_softmax(const Tensor& x, int64_t dim, bool to_float) {
  const Tensor wide = to_float ? x.to(at::kFloat) : widened(x);
  const Tensor shifted = wide - at::amax(wide, dim, true);
  const Tensor total = at::sum(at::exp(shifted), dim, true);
  return (shifted - at::log(total)).to(to_float ? at::kFloat : x.scalar_type());
}
Tensor softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim,
                        at::ScalarType type) {
  return (output * (grad - at::sum(grad * output, dim, true))).to(type);
}
Tensor log_softmax_backward(const Tensor& grad, const Tensor& output, int64_t dim,
                            at::ScalarType type) {
  return (grad - at::exp(output) * at::sum(grad, dim, true)).to(type);
}
/// Largest value along dim, 0 where it is infinite, so that the differences stay defined.
Tensor finite_maximum(const Tensor& x, IntArrayRef dims) {
  const Tensor most = at::amax(x, dims, true);
  return most.masked_fill(most.isinf(), 0);
}
Tensor logsumexp(const Tensor& x, IntArrayRef dims, bool keepdim) {
  const auto reduced = wrapped(dims, x.dim());
  const Tensor most = finite_maximum(x, reduced);
  const Tensor total = at::sum(at::exp(x - most), reduced, true);
  return without(at::log(total) + most, reduced, keepdim);
}

}  // namespace

SHARDFIELD_OPS(reproducible_norms) {
  table.reproducible_composed("aten::var.correction", TORCH_FN(variance));
  table.reproducible_composed("aten::std.correction", TORCH_FN(deviation));
  table.reproducible_composed("aten::var_mean.correction", TORCH_FN(variance_and_mean));
  table.reproducible_composed("aten::std_mean.correction", TORCH_FN(deviation_and_mean));
  table.reproducible_composed("aten::linalg_vector_norm", TORCH_FN(vector_norm));
  table.reproducible_composed("aten::norm.Scalar", TORCH_FN(norm_scalar));
  table.reproducible_composed("aten::norm.ScalarOpt_dtype", TORCH_FN(norm_dtype));
  table.reproducible_composed("aten::norm.ScalarOpt_dim", TORCH_FN(norm_dims));
  table.reproducible_composed("aten::norm.ScalarOpt_dim_dtype", TORCH_FN(norm_dims_dtype));
  table.reproducible_composed("aten::batch_norm", TORCH_FN(batch_normed));
  table.reproducible_composed("aten::instance_norm", TORCH_FN(instance_norm));
  table.reproducible_composed("aten::group_norm", TORCH_FN(group_norm));
  table.reproducible_composed("aten::layer_norm", TORCH_FN(layer_norm));
  table.reproducible_composed("aten::rms_norm", TORCH_FN(rms_norm));
  table.reproducible_composed("aten::_softmax",
                              TORCH_FN((UnderFormula<at::_ops::_softmax, &softmax>::run)));
  table.reproducible_composed("aten::_log_softmax",
                              TORCH_FN((UnderFormula<at::_ops::_log_softmax, &log_softmax>::run)));
  table.reproducible_composed(
      "aten::_softmax_backward_data",
      TORCH_FN((UnderFormula<at::_ops::_softmax_backward_data, &softmax_backward>::run)));
  table.reproducible_composed(
      "aten::_log_softmax_backward_data",
      TORCH_FN((UnderFormula<at::_ops::_log_softmax_backward_data, &log_softmax_backward>::run)));
  table.reproducible_composed("aten::logsumexp",
                              TORCH_FN((UnderFormula<at::_ops::logsumexp, &logsumexp>::run)));
}

}  // namespace shardfield::ops
