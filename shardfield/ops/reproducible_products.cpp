// Sums, products and convolutions in reproducible mode: exact, by slices of the operands
// (ops/exact_sums.h).

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/ops/exact_sums.h"
#include "shardfield/ops/reproducible_form.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::OptionalIntArrayRef;
using at::Scalar;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;
using OptTensor = std::optional<Tensor>;
using Dtype = std::optional<at::ScalarType>;

// Sums.

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
  Tensor out = exact_products(x, weight, taps(weight) * weight.size(transposed ? 0 : 1), f);
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

/// A function that is linear in each of two tensors, and how many products one element of it, or of
/// its derivatives, adds at most.
struct Bilinear {
  std::function<Tensor(const Tensor&, const Tensor&)> f;
  int64_t terms, terms_of_derivatives;
};

Tensor exact_bilinear(const Tensor& a, const Tensor& b, const Bilinear& bilinear);

/// Its derivative with respect to one factor is linear in the gradient and the other factor, hence
/// of the same kind: autograd works it out for each pair of slices.
struct BilinearFn : torch::autograd::Function<BilinearFn> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& a, const Tensor& b,
                        const Bilinear& bilinear) {
    ctx->save_for_backward({a, b});
    comm::remember_scope(ctx);
    ctx->saved_data["bilinear"] = c10::IValue::make_capsule(c10::make_intrusive<Holder>(bilinear));
    return exact_products(a, b, bilinear.terms, bilinear.f);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const comm::BackwardScope scope(ctx);
    const auto saved = ctx->get_saved_variables();
    const auto holder = ctx->saved_data["bilinear"].toCapsule();
    const Bilinear& bilinear = static_cast<const Holder&>(*holder).bilinear;
    const Tensor &a = saved[0], &b = saved[1];
    Tensor grad_a, grad_b;
    if (ctx->needs_input_grad(0))
      grad_a = exact_bilinear(grads[0], b, derivative(a, bilinear, true));
    if (ctx->needs_input_grad(1))
      grad_b = exact_bilinear(grads[0], a, derivative(b, bilinear, false));
    return {grad_a, grad_b, {}};
  }

 private:
  struct Holder : torch::CustomClassHolder {
    Bilinear bilinear;
    explicit Holder(Bilinear b) : bilinear(std::move(b)) {}
  };

  /// (gradient, other factor) to the gradient of the factor `like`.
  static Bilinear derivative(const Tensor& like, const Bilinear& of, bool is_first) {
    const auto f = [like = like.detach(), f = of.f, is_first](const Tensor& grad,
                                                              const Tensor& other) {
      const bool again = tensor::records_grad(grad) || tensor::records_grad(other);
      const at::AutoGradMode records(true);
      const Tensor x = at::zeros_like(like, grad.scalar_type()).requires_grad_();
      const Tensor y = is_first ? f(x, other) : f(other, x);
      return torch::autograd::grad({y}, {x}, {grad}, again, again)[0];
    };
    return {f, of.terms_of_derivatives, of.terms_of_derivatives};
  }
};

Tensor exact_bilinear(const Tensor& a, const Tensor& b, const Bilinear& bilinear) {
  if (tensor::records_grad(a) || tensor::records_grad(b)) return BilinearFn::apply(a, b, bilinear);
  return exact_products(a, b, bilinear.terms, bilinear.f);
}

std::tuple<Tensor, Tensor, Tensor> convolution_gradients(
    const Tensor& grad, const Tensor& x, const Tensor& weight, at::OptionalSymIntArrayRef,
    SymIntArrayRef stride, SymIntArrayRef padding, SymIntArrayRef dilation, bool transposed,
    SymIntArrayRef output_padding, SymInt groups, std::array<bool, 3> mask) {
  // By value: derivatives of derivatives call it later.
  const auto backward = [stride = stride.vec(), padding = padding.vec(), dilation = dilation.vec(),
                         output_padding = output_padding.vec(), transposed,
                         groups](const Tensor& g, const Tensor& a, const Tensor& w,
                                 std::array<bool, 3> which) {
    return at::convolution_backward_symint(g, a.to(g.scalar_type()), w.to(g.scalar_type()),
                                           std::nullopt, stride, padding, dilation, transposed,
                                           output_padding, groups, which);
  };
  const auto per_channel = [](const Tensor& t) {
    return t.numel() / std::max<int64_t>(t.size(1), 1);
  };
  const int64_t of_weight = std::max(per_channel(grad), per_channel(x));
  const int64_t of_x = taps(weight) * weight.size(transposed ? 1 : 0);
  const int64_t most = std::max({of_weight, of_x, taps(weight) * weight.size(transposed ? 0 : 1)});
  Tensor grad_x, grad_weight, grad_bias;
  if (mask[0]) {
    const auto f = [backward, x = x.detach().to(at::kDouble)](const Tensor& g, const Tensor& w) {
      return std::get<0>(backward(g, x, w, {true, false, false}));
    };
    grad_x = exact_bilinear(grad, weight, {f, of_x, most});
  }
  if (mask[1]) {
    const auto f = [backward, weight = weight.detach().to(at::kDouble)](const Tensor& g,
                                                                        const Tensor& a) {
      return std::get<1>(backward(g, a, weight, {false, true, false}));
    };
    grad_weight = exact_bilinear(grad, x, {f, of_weight, most});
  }
  if (mask[2]) {
    std::vector<int64_t> dims = wrapped(std::nullopt, grad.dim());
    dims.erase(dims.begin() + (grad.dim() - weight.dim() + 1));
    // Exact where grad is plain too, as it is when the channels of x are cut.
    grad_bias = sum_dims(grad.detach(), dims, false, std::nullopt);
    if (tensor::records_grad(grad)) {
      const Tensor recorded = at::sum(grad, dims);
      grad_bias = grad_bias + (recorded - recorded.detach());
    }
  }
  return {grad_x, grad_weight, grad_bias};
}

}  // namespace

SHARDFIELD_OPS(reproducible_products) {
  table.reproducible_composed("aten::sum", TORCH_FN((UnderFormula<at::_ops::sum, &sum_all>::run)));
  table.reproducible_composed("aten::sum.dim_IntList",
                              TORCH_FN((UnderFormula<at::_ops::sum_dim_IntList, &sum_dims>::run)));
  table.reproducible_composed("aten::mean",
                              TORCH_FN((UnderFormula<at::_ops::mean, &mean_all>::run)));
  table.reproducible_composed("aten::mean.dim",
                              TORCH_FN((UnderFormula<at::_ops::mean_dim, &mean_dims>::run)));
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
}

}  // namespace shardfield::ops
