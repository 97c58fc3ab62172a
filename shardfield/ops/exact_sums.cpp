#include "shardfield/ops/exact_sums.h"

#include <cmath>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/dispatch/reproducible.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using dispatch::OrdinaryArithmetic;

constexpr int kMantissa = 53;     // of float64
constexpr int kLargest = 900;     // exponents beyond would overflow while scaling
constexpr int kSlicesSummed = 3;  // bits: up to 8 products of slices have the same weight

/// Bits of an operand that are kept below its largest magnitude.
int kept_bits(at::ScalarType type) {
  return type == at::kDouble ? 70 : 48;
}

int bits_of(int64_t count) {
  int bits = 0;
  while ((int64_t{1} << bits) < count) ++bits;
  return bits;
}

bool has_slices(const Tensor& x) {
  return x.numel() > 0 && at::isFloatingType(x.scalar_type());
}

/// e with |x| <= 2^e; nothing when a value is not finite.
std::optional<int> largest_exponent(const Tensor& x) {
  const double largest = tensor::gather(at::amax(x.abs())).item<double>();
  int exponent = 0;
  if (!std::isfinite(largest)) return std::nullopt;
  std::frexp(largest, &exponent);
  if (std::abs(exponent) > kLargest) return std::nullopt;
  return exponent;
}

/// sum_i terms[i] * 2^(exponent - bits * (i + 1)), smallest first.
Tensor weighted_sum(const std::vector<Tensor>& terms, int bits, int exponent) {
  Tensor total = terms.back();
  for (size_t i = terms.size() - 1; i-- > 0;)
    total = at::add(terms[i], total, std::ldexp(1.0, -bits));
  return total * std::ldexp(1.0, exponent - bits);
}

}  // namespace

int bits_for_sum(int64_t terms) {
  return kMantissa - bits_of(terms) - kSlicesSummed;
}
int bits_for_products(int64_t terms) {
  return (kMantissa - bits_of(terms) - kSlicesSummed) / 2;
}

std::optional<Slices> sliced(const Tensor& x, int bits) {
  const auto exponent = largest_exponent(x);
  if (!exponent) return std::nullopt;
  Slices slices{{}, bits, *exponent};
  const int count = (kept_bits(x.scalar_type()) + bits - 1) / bits;
  Tensor rest = x.to(at::kDouble) * std::ldexp(1.0, bits - *exponent);
  for (int i = 0; i < count; ++i) {
    slices.parts.push_back(rest.round());
    if (i + 1 < count) rest = (rest - slices.parts.back()) * std::ldexp(1.0, bits);
  }
  return slices;
}

Tensor exact_sum(const Tensor& x, int64_t terms, const std::function<Tensor(const Tensor&)>& f) {
  if (x.is_complex())
    return at::complex(exact_sum(at::real(x), terms, f), exact_sum(at::imag(x), terms, f));
  const OrdinaryArithmetic ordinary;
  const auto slices = has_slices(x) ? sliced(x, bits_for_sum(terms)) : std::nullopt;
  if (!slices) return f(x);
  std::vector<Tensor> sums;
  for (const Tensor& part : slices->parts) sums.push_back(f(part));
  return weighted_sum(sums, slices->bits, slices->exponent).to(x.scalar_type());
}

Tensor exact_products(const Tensor& a, const Tensor& b, int64_t terms,
                      const std::function<Tensor(const Tensor&, const Tensor&)>& f) {
  if (a.is_complex()) {
    const auto of_parts = [&](const Tensor& x, const Tensor& y) {
      return exact_products(x, y, terms, f);
    };
    const Tensor re_a = at::real(a), im_a = at::imag(a), re_b = at::real(b), im_b = at::imag(b);
    return at::complex(of_parts(re_a, re_b) - of_parts(im_a, im_b),
                       of_parts(re_a, im_b) + of_parts(im_a, re_b));
  }
  const OrdinaryArithmetic ordinary;
  if (!has_slices(a) || !has_slices(b)) return f(a, b);
  const int bits = bits_for_products(terms);
  const auto left = sliced(a, bits);
  const auto right = sliced(b, bits);
  if (!left || !right) return f(a, b);
  std::vector<Tensor> sums(std::min(left->parts.size(), right->parts.size()));
  for (size_t i = 0; i < left->parts.size(); ++i) {
    for (size_t j = 0; j < right->parts.size() && i + j < sums.size(); ++j) {
      const Tensor product = f(left->parts[i], right->parts[j]);
      sums[i + j] = sums[i + j].defined() ? sums[i + j] + product : product;
    }
  }
  return weighted_sum(sums, bits, left->exponent + right->exponent - bits).to(a.scalar_type());
}

namespace {

/// The first of equal values; its gradient goes to them in slices of few bits.
struct SplitGradientFn : torch::autograd::Function<SplitGradientFn> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, at::TensorList copies) {
    ctx->saved_data["count"] = static_cast<int64_t>(copies.size());
    return copies[0].detach();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto count = static_cast<size_t>(ctx->saved_data["count"].toInt());
    return parts_of(grads[0], count);
  }
  /// Up to 2^21 elements of the result are one element of x.
  static int bits() { return bits_for_sum(int64_t{1} << 21); }
  static size_t count(at::ScalarType type) { return (kept_bits(type) + bits() - 1) / bits(); }

  /// The derivative with respect to the gradient itself is that of the first part alone, so that
  /// the parts' derivatives sum to the right one.
  static std::vector<Tensor> parts_of(const Tensor& grad, size_t count) {
    std::vector<Tensor> parts(count);
    parts[0] = grad;
    const OrdinaryArithmetic ordinary;
    const Tensor value = grad.detach();
    const auto slices = has_slices(value) ? sliced(value, bits()) : std::nullopt;
    if (!slices) return parts;
    for (size_t i = 0; i < count; ++i) {
      const int exponent = slices->exponent - slices->bits * static_cast<int>(i + 1);
      parts[i] = slices->parts[i] * std::ldexp(1.0, exponent);
    }
    if (tensor::records_grad(grad)) parts[0] = grad - (value - parts[0]);
    return parts;
  }
};

}  // namespace

Tensor with_exact_gradient(const Tensor& x, const std::function<Tensor(const Tensor&)>& f) {
  const OrdinaryArithmetic ordinary;
  if (!tensor::records_grad(x) || !at::isFloatingType(x.scalar_type())) return f(x);
  const Tensor wide = x.to(at::kDouble);
  std::vector<Tensor> copies(SplitGradientFn::count(x.scalar_type()));
  for (Tensor& copy : copies) copy = f(wide);
  return SplitGradientFn::apply(at::TensorList(copies)).to(x.scalar_type());
}

}  // namespace shardfield::ops
