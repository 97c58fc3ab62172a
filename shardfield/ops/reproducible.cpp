// How ops work in reproducible mode (dispatch/reproducible.h). Sums and products are exact, by
// slices; norms, losses and softmax are written out of sums and elementwise ops, whose derivatives
// are again sums and elementwise ops. Ops that are not here compute every element from its own
// operands in a fixed order, or round as usual (docs/reproducible.md lists those).

#include <cmath>

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/core/Reduction.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/exact_sums.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/whole_gradient.h"

namespace shardfield::ops {

namespace {

using at::IntArrayRef;
using at::OptionalIntArrayRef;
using at::Scalar;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using OptTensor = std::optional<Tensor>;
using Dtype = std::optional<at::ScalarType>;

bool is_given(const OptTensor& t) {
  return t && t->defined();
}

/// A kernel under PyTorch's derivative formula of the op; gradients come back of their tensor's own
/// kind.
template <class Op, auto kernel, class Schema = typename Op::schema>
struct UnderFormula;
template <class Op, auto kernel, class R, class... A>
struct UnderFormula<Op, kernel, R(A...)> {
  static R run(A... a) {
    if (!at::GradMode::is_enabled() ||
        c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality))
      return kernel(a...);
    return dispatch::call_formula<Op>(with_own_gradient(a)...);
  }
  static Tensor with_own_gradient(const Tensor& t) { return tensor::with_own_gradient(t); }
  static OptTensor with_own_gradient(const OptTensor& t) {
    return is_given(t) ? OptTensor(tensor::with_own_gradient(*t)) : t;
  }
  template <class T>
  static const T& with_own_gradient(const T& other) {
    return other;
  }
};

/// PyTorch's decomposition of an op; gradients come back of their tensor's own kind.
template <class Op, class Schema = typename Op::schema>
struct Decomposed;
template <class Op, class R, class... A>
struct Decomposed<Op, R(A...)> {
  static R run(A... a) { return dispatch::call_formula<Op>(tensor::with_own_gradient(a)...); }
};

// Sums.

std::vector<int64_t> wrapped(OptionalIntArrayRef dims, int64_t ndim) {
  std::vector<int64_t> result;
  if (dims && !dims->empty()) {
    result = dims->vec();
    for (int64_t& d : result) d = at::maybe_wrap_dim(d, ndim);
  } else {
    for (int64_t d = 0; d < ndim; ++d) result.push_back(d);
  }
  return result;
}

int64_t count_of(const Tensor& x, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t d : dims) count *= x.size(d);
  return count;
}

Tensor sum_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, Dtype dtype) {
  const auto reduced = wrapped(dims, x.dim());
  const auto type =
      dtype.value_or(at::isIntegralType(x.scalar_type(), true) ? at::kLong : x.scalar_type());
  const auto f = [&](const Tensor& part) { return at::sum(part, reduced, keepdim); };
  return exact_sum(x.to(type), count_of(x, reduced), f);
}
Tensor sum_all(const Tensor& x, Dtype dtype) {
  return sum_dims(x, std::nullopt, false, dtype);
}
Tensor mean_dims(const Tensor& x, OptionalIntArrayRef dims, bool keepdim, Dtype dtype) {
  const auto type = dtype.value_or(x.scalar_type());
  const bool wide = type == at::kDouble || at::isComplexType(type);
  const Tensor total = sum_dims(x, dims, keepdim, wide ? type : at::kFloat);
  return (total / count_of(x, wrapped(dims, x.dim()))).to(type);
}
Tensor mean_all(const Tensor& x, Dtype dtype) {
  return mean_dims(x, std::nullopt, false, dtype);
}

// Products.

Tensor product(const Tensor& a, const Tensor& b) {
  const bool batched = a.dim() == 3;
  return exact_products(a, b, a.size(-1), [&](const Tensor& x, const Tensor& y) {
    return batched ? at::bmm(x, y) : at::mm(x, y);
  });
}

/// a b for matrices or batches of them. PyTorch's formula would call its own product where both
/// factors of a gradient are plain.
struct ProductFn : torch::autograd::Function<ProductFn> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& a, const Tensor& b) {
    ctx->save_for_backward({a, b});
    comm::remember_scope(ctx);
    const at::AutoDispatchBelowADInplaceOrView below;
    return product(a, b);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const comm::BackwardScope scope(ctx);
    const auto saved = ctx->get_saved_variables();
    const Tensor &a = saved[0], &b = saved[1];
    Tensor grad_a, grad_b;
    if (ctx->needs_input_grad(0))
      grad_a = as_cut(recorded(grads[0], b.transpose(-2, -1).conj()), a);
    if (ctx->needs_input_grad(1))
      grad_b = as_cut(recorded(a.transpose(-2, -1).conj(), grads[0]), b);
    return {grad_a, grad_b};
  }
  static Tensor as_cut(const Tensor& grad, const Tensor& like) {
    return tensor::redistribute(grad,
                                tensor::is_sharded(like) ? &tensor::layout_of(like) : nullptr);
  }
  static Tensor recorded(const Tensor& a, const Tensor& b) {
    return tensor::records_grad(a) || tensor::records_grad(b) ? apply(a, b) : product(a, b);
  }
};

Tensor matrix_product(const Tensor& a, const Tensor& b) {
  return ProductFn::recorded(a, b);
}
Tensor matrix_vector(const Tensor& a, const Tensor& b) {
  return matrix_product(a, b.unsqueeze(1)).squeeze(1);
}
Tensor inner_product(const Tensor& a, const Tensor& b) {
  return at::sum(a * b);
}

Tensor scaled(const Tensor& t, const Scalar& factor) {
  return factor.equal(1) ? t : t * factor;
}
/// beta * c + alpha * product; a beta of 0 means that c does not count, not even its NaN.
Tensor added(const Tensor& c, const Tensor& product, const Scalar& beta, const Scalar& alpha) {
  if (beta.equal(0)) return scaled(product, alpha);
  return scaled(c, beta) + scaled(product, alpha);
}
Tensor addmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
             const Scalar& alpha) {
  return added(c, matrix_product(a, b), beta, alpha);
}
Tensor baddbmm(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
               const Scalar& alpha) {
  return added(c, matrix_product(a, b), beta, alpha);
}
Tensor addmv(const Tensor& c, const Tensor& a, const Tensor& b, const Scalar& beta,
             const Scalar& alpha) {
  return added(c, matrix_vector(a, b), beta, alpha);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& mask,
                 double dropout_p, bool is_causal, std::optional<double> scale, bool gqa) {
  const double factor = scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(-1))));
  const auto heads = [&](const Tensor& t) {
    return gqa ? t.repeat_interleave(query.size(-3) / t.size(-3), -3) : t;
  };
  Tensor scores = at::matmul(query * factor, heads(key).transpose(-2, -1));
  if (is_causal) {
    const Tensor seen = at::ones({query.size(-2), key.size(-2)}, at::kBool).tril();
    scores = scores.masked_fill(seen.to(scores.device()).logical_not(), -INFINITY);
  }
  if (is_given(mask)) {
    scores = mask->scalar_type() == at::kBool ? scores.masked_fill(mask->logical_not(), -INFINITY)
                                              : scores + *mask;
  }
  Tensor weights = at::softmax(scores, -1);
  if (dropout_p > 0) weights = at::dropout(weights, dropout_p, true);
  return at::matmul(weights, heads(value));
}

// Convolutions.

int64_t taps(const Tensor& weight) {
  return c10::multiply_integers(weight.sizes().slice(2));
}

Tensor convolution(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                   SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation,
                   bool transposed, SymIntArrayRef output_padding, SymInt groups) {
  const auto f = [&](const Tensor& a, const Tensor& w) {
    return at::convolution_symint(a, w, {}, stride, padding, dilation, transposed, output_padding,
                                  groups);
  };
  const Tensor out = exact_products(x, weight, taps(weight) * weight.size(transposed ? 0 : 1), f);
  if (!is_given(bias)) return out;
  std::vector<int64_t> sizes(out.dim(), 1);
  sizes[out.dim() - weight.dim() + 1] = -1;
  return out + bias->reshape(sizes);
}

Tensor convolution_with_flags(const Tensor& x, const Tensor& weight, const OptTensor& bias,
                              SymIntArrayRef stride, SymIntArrayRef padding,
                              SymIntArrayRef dilation, bool transposed,
                              SymIntArrayRef output_padding, SymInt groups, bool, bool, bool,
                              bool) {
  return at::convolution_symint(x, weight, bias, stride, padding, dilation, transposed,
                                output_padding, std::move(groups));
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& x, const Tensor& weight, at::OptionalSymIntArrayRef,
    SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
    SymIntArrayRef output_padding, SymInt groups, std::array<bool, 3> mask) {
  const auto backward = [&](const Tensor& g, const Tensor& a, const Tensor& w,
                            std::array<bool, 3> which) {
    return at::convolution_backward_symint(g, a, w, std::nullopt, stride, padding, dilation,
                                           transposed, output_padding, groups, which);
  };
  Tensor grad_x, grad_weight, grad_bias;
  if (mask[0]) {
    const Tensor shape = x.to(at::kDouble);
    grad_x =
        exact_products(grad, weight, taps(weight) * weight.size(transposed ? 1 : 0),
                       [&](const Tensor& g, const Tensor& w) {
                         const bool wide = w.scalar_type() == at::kDouble;
                         return std::get<0>(backward(g, wide ? shape : x, w, {true, false, false}));
                       });
  }
  const int64_t channels = std::max<int64_t>(grad.size(1), 1);
  if (mask[1]) {
    const Tensor shape = weight.to(at::kDouble);
    grad_weight = exact_products(
        grad, x, std::max(grad.numel() / channels, x.numel() / std::max<int64_t>(x.size(1), 1)),
        [&](const Tensor& g, const Tensor& a) {
          const bool wide = a.scalar_type() == at::kDouble;
          return std::get<1>(backward(g, a, wide ? shape : weight, {false, true, false}));
        });
  }
  if (mask[2]) {
    std::vector<int64_t> dims = wrapped(std::nullopt, grad.dim());
    dims.erase(dims.begin() + (grad.dim() - weight.dim() + 1));
    grad_bias = sum_dims(grad, dims, false, std::nullopt);
  }
  return {grad_x, grad_weight, grad_bias};
}

/// The exact gradients, with the derivative that they have outside of this mode: PyTorch's formula
/// for it would gather.
std::tuple<Tensor, Tensor, Tensor> convolution_gradients(
    const Tensor& grad, const Tensor& x, const Tensor& weight, at::OptionalSymIntArrayRef bias,
    SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
    SymIntArrayRef output_padding, SymInt groups, std::array<bool, 3> mask) {
  const auto exact = [&] {
    const at::NoGradGuard no_grad;
    return convolution_backward(grad, x, weight, bias, stride, padding, dilation, transposed,
                                output_padding, groups, mask);
  }();
  if (!tensor::records_grad(grad) && !tensor::records_grad(x) && !tensor::records_grad(weight))
    return exact;
  const dispatch::OrdinaryArithmetic ordinary;
  const auto usual = at::convolution_backward_symint(
      grad, x, weight, bias, stride, padding, dilation, transposed, output_padding, groups, mask);
  const auto joined = [](const Tensor& value, const Tensor& recorded) {
    return value.defined() ? value + (recorded - recorded.detach()) : value;
  };
  return {joined(std::get<0>(exact), std::get<0>(usual)),
          joined(std::get<1>(exact), std::get<1>(usual)),
          joined(std::get<2>(exact), std::get<2>(usual))};
}

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
  const Tensor value = dtype ? x.to(*dtype) : x;
  const auto reduced = wrapped(dims, x.dim());
  if (p == 0 || std::isinf(p) || value.is_complex()) {
    const dispatch::OrdinaryArithmetic ordinary;
    return at::linalg_vector_norm(value, ord, reduced, keepdim);
  }
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
  Tensor target = *running;
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

// Losses.

Tensor reduced(const Tensor& loss, int64_t reduction) {
  if (reduction == at::Reduction::Mean) return at::mean(loss);
  return reduction == at::Reduction::Sum ? at::sum(loss) : loss;
}
Tensor mse_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  const Tensor difference = x - target;
  return reduced(difference * difference, reduction);
}
Tensor l1_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  return reduced((x - target).abs(), reduction);
}
Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, int64_t reduction, double beta) {
  const Tensor size = (x - target).abs();
  if (beta == 0) return reduced(size, reduction);
  return reduced(at::where(size < beta, size * size * (0.5 / beta), size - 0.5 * beta), reduction);
}
Tensor huber_loss(const Tensor& x, const Tensor& target, int64_t reduction, double delta) {
  const Tensor size = (x - target).abs();
  return reduced(at::where(size <= delta, size * size * 0.5, (size - 0.5 * delta) * delta),
                 reduction);
}
Tensor soft_margin_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  return reduced(at::softplus(-target * x), reduction);
}
Tensor weighted(const Tensor& loss, const OptTensor& weight) {
  return is_given(weight) ? loss * *weight : loss;
}
Tensor binary_cross_entropy(const Tensor& x, const Tensor& target, const OptTensor& weight,
                            int64_t reduction) {
  const Tensor loss =
      -(target * at::log(x).clamp_min(-100) + (1 - target) * at::log1p(-x).clamp_min(-100));
  return reduced(weighted(loss, weight), reduction);
}
Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target,
                                        const OptTensor& weight, const OptTensor& pos_weight,
                                        int64_t reduction) {
  Tensor log_term = at::softplus(-x);
  if (is_given(pos_weight)) log_term = log_term * (1 + (*pos_weight - 1) * target);
  return reduced(weighted((1 - target) * x + log_term, weight), reduction);
}

/// x (C), (N, C) or (N, C, ...) of log probabilities.
Tensor nll_loss(const Tensor& x, const Tensor& target, const OptTensor& weight, int64_t reduction,
                SymInt ignore) {
  const int64_t classes = x.dim() == 1 ? 0 : 1;
  std::vector<int64_t> wanted = x.sizes().vec();
  wanted.erase(wanted.begin() + classes);
  SHARDFIELD_CHECK(target.sizes() == at::IntArrayRef(wanted), "cross_entropy_loss",
                   "expected class targets of sizes ", at::IntArrayRef(wanted), " for input ",
                   x.sizes(), ", got ", target.sizes());
  const Tensor counts = target.ne(ignore.guard_int(__FILE__, __LINE__));
  const Tensor label = target.masked_fill(counts.logical_not(), 0);
  Tensor share = counts.to(x.scalar_type());
  if (is_given(weight)) share = share * at::embedding(weight->unsqueeze(1), label).squeeze(-1);
  const Tensor loss = -at::gather(x, classes, label.unsqueeze(classes)).squeeze(classes) * share;
  if (reduction == at::Reduction::Mean) return at::sum(loss) / at::sum(share);
  return reduced(loss, reduction);
}

// Windows and borders.

/// An op that selects or copies elements of its input.
template <class Op, class Schema = typename Op::schema>
struct Copying;
template <class Op, class... A>
struct Copying<Op, Tensor(const Tensor&, A...)> {
  static Tensor run(const Tensor& x, A... a) {
    return with_exact_gradient(x, [&](const Tensor& t) { return Op::call(t, a...); });
  }
};

// Rows that are added at places.

Tensor added_at_index(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source,
                      const Scalar& alpha) {
  const Tensor sums = exact_sum(source, index.numel(), [&](const Tensor& part) {
    return at::index_add(at::zeros_like(x, part.scalar_type()), dim, index, part);
  });
  return x + scaled(sums, alpha);
}
Tensor added_at_places(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  return x + exact_sum(source, x.dim() ? source.size(dim) : 1, [&](const Tensor& part) {
           return at::scatter_add(at::zeros_like(x, part.scalar_type()), dim, index, part);
         });
}

}  // namespace

SHARDFIELD_OPS(reproducible) {
  table.reproducible_composed("aten::sum", TORCH_FN((UnderFormula<at::_ops::sum, &sum_all>::run)));
  table.reproducible_composed("aten::sum.dim_IntList",
                              TORCH_FN((UnderFormula<at::_ops::sum_dim_IntList, &sum_dims>::run)));
  table.reproducible_composed("aten::mean",
                              TORCH_FN((UnderFormula<at::_ops::mean, &mean_all>::run)));
  table.reproducible_composed("aten::mean.dim",
                              TORCH_FN((UnderFormula<at::_ops::mean_dim, &mean_dims>::run)));
  table.reproducible_composed("aten::var.correction", TORCH_FN(variance));
  table.reproducible_composed("aten::std.correction", TORCH_FN(deviation));
  table.reproducible_composed("aten::var_mean.correction", TORCH_FN(variance_and_mean));
  table.reproducible_composed("aten::std_mean.correction", TORCH_FN(deviation_and_mean));
  table.reproducible_composed("aten::linalg_vector_norm", TORCH_FN(vector_norm));
  table.reproducible_composed("aten::norm.Scalar", TORCH_FN(norm_scalar));
  table.reproducible_composed("aten::norm.ScalarOpt_dtype", TORCH_FN(norm_dtype));
  table.reproducible_composed("aten::norm.ScalarOpt_dim", TORCH_FN(norm_dims));
  table.reproducible_composed("aten::norm.ScalarOpt_dim_dtype", TORCH_FN(norm_dims_dtype));

  table.reproducible_composed("aten::mm", TORCH_FN(matrix_product));
  table.reproducible_composed("aten::bmm", TORCH_FN(matrix_product));
  table.reproducible_composed("aten::mv", TORCH_FN(matrix_vector));
  table.reproducible_composed("aten::dot", TORCH_FN(inner_product));
  table.reproducible_composed("aten::addmm", TORCH_FN(addmm));
  table.reproducible_composed("aten::baddbmm", TORCH_FN(baddbmm));
  table.reproducible_composed("aten::addmv", TORCH_FN(addmv));
  table.reproducible_composed("aten::matmul", TORCH_FN(Decomposed<at::_ops::matmul>::run));
  table.reproducible_composed("aten::scaled_dot_product_attention", TORCH_FN(attention));

  table.reproducible_composed("aten::convolution",
                              TORCH_FN((UnderFormula<at::_ops::convolution, &convolution>::run)));
  table.reproducible_composed("aten::_convolution", TORCH_FN(convolution_with_flags));
  table.reproducible_composed("aten::convolution_backward", TORCH_FN(convolution_gradients));

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

  table.reproducible_composed("aten::mse_loss", TORCH_FN(mse_loss));
  table.reproducible_composed("aten::l1_loss", TORCH_FN(l1_loss));
  table.reproducible_composed("aten::smooth_l1_loss", TORCH_FN(smooth_l1_loss));
  table.reproducible_composed("aten::huber_loss", TORCH_FN(huber_loss));
  table.reproducible_composed("aten::soft_margin_loss", TORCH_FN(soft_margin_loss));
  table.reproducible_composed("aten::binary_cross_entropy", TORCH_FN(binary_cross_entropy));
  table.reproducible_composed("aten::binary_cross_entropy_with_logits",
                              TORCH_FN(binary_cross_entropy_with_logits));
  table.reproducible_decomposed("aten::cross_entropy_loss");
  for (const char* name : {"aten::nll_loss_nd", "aten::nll_loss", "aten::nll_loss2d"})
    table.reproducible_composed(name, TORCH_FN(nll_loss));

  using namespace at::_ops;
  table.reproducible_composed("aten::max_pool1d", TORCH_FN(Copying<max_pool1d>::run));
  table.reproducible_composed("aten::max_pool2d", TORCH_FN(Copying<max_pool2d>::run));
  table.reproducible_composed("aten::max_pool3d", TORCH_FN(Copying<max_pool3d>::run));
  table.reproducible_composed("aten::upsample_nearest1d",
                              TORCH_FN(Copying<upsample_nearest1d>::run));
  table.reproducible_composed("aten::upsample_nearest2d",
                              TORCH_FN(Copying<upsample_nearest2d>::run));
  table.reproducible_composed("aten::upsample_nearest3d",
                              TORCH_FN(Copying<upsample_nearest3d>::run));
  table.reproducible_composed("aten::reflection_pad1d", TORCH_FN(Copying<reflection_pad1d>::run));
  table.reproducible_composed("aten::reflection_pad2d", TORCH_FN(Copying<reflection_pad2d>::run));
  table.reproducible_composed("aten::reflection_pad3d", TORCH_FN(Copying<reflection_pad3d>::run));
  table.reproducible_composed("aten::replication_pad1d", TORCH_FN(Copying<replication_pad1d>::run));
  table.reproducible_composed("aten::replication_pad2d", TORCH_FN(Copying<replication_pad2d>::run));
  table.reproducible_composed("aten::replication_pad3d", TORCH_FN(Copying<replication_pad3d>::run));
  table.reproducible_composed("aten::index.Tensor", TORCH_FN(Copying<index_Tensor>::run));
  table.reproducible_composed("aten::index_select", TORCH_FN(Copying<index_select>::run));
  table.reproducible_composed("aten::gather", TORCH_FN(Copying<gather>::run));
  table.reproducible_composed("aten::embedding", TORCH_FN(Copying<embedding>::run));
  table.reproducible_composed("aten::_pad_circular", TORCH_FN(Copying<_pad_circular>::run));

  table.reproducible_composed("aten::index_add",
                              TORCH_FN((UnderFormula<at::_ops::index_add, &added_at_index>::run)));
  table.reproducible_composed(
      "aten::scatter_add", TORCH_FN((UnderFormula<at::_ops::scatter_add, &added_at_places>::run)));
}

}  // namespace shardfield::ops
