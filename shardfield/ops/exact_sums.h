#pragma once

#include <functional>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

/// Sums that do not round, so that their order, and with it the number of ranks, cannot show.
///
/// A tensor is cut into slices of few bits below its largest magnitude, as in Ozaki et al.,
/// "Error-free transformations of matrix multiplication by using fast routines of matrix
/// multiplication" (Numerical Algorithms 59, 2012), and Demmel and Nguyen, "Parallel reproducible
/// summation" (IEEE Transactions on Computers 64, 2015). The slices are integers in float64, small
/// enough that every sum of them, or of their products, is exact. What lies below the last slice is
/// dropped: 2^-48 of the largest magnitude for float32 and shorter types, 2^-70 for float64.
namespace shardfield::ops {

/// x = sum_i parts[i] * 2^(exponent - bits * (i + 1)), parts integers in float64 of at most `bits`
/// bits, cut as x is.
struct Slices {
  std::vector<at::Tensor> parts;
  int bits;
  int exponent;
};

/// @param terms  how many values, or products of two values, one sum holds over all ranks
int bits_for_sum(int64_t terms);
int bits_for_products(int64_t terms);

/// Slices of a real floating tensor; nothing where it is empty or holds a value that is not finite
/// (or beyond 2^900). Collective over the cuts of x, which agree on its largest magnitude.
std::optional<Slices> sliced(const at::Tensor& x, int bits);

/// f(x) for an f that only adds: linear, its coefficients integers of at most 8.
/// Of complex values real and imaginary part each.
/// @param terms  how many elements of x one result element adds
/// @param f      called on float64 tensors cut as x is
/// @return f(x), rounded once, in x's dtype
at::Tensor exact_sum(const at::Tensor& x, int64_t terms,
                     const std::function<at::Tensor(const at::Tensor&)>& f);

/// f(a, b) for an f that adds products of one element of each: a matrix product or a convolution.
/// Complex products are four real ones.
at::Tensor exact_products(const at::Tensor& a, const at::Tensor& b, int64_t terms,
                          const std::function<at::Tensor(const at::Tensor&, const at::Tensor&)>& f);

/// The result of `f`, which selects, copies or adds elements of x (windows, a padding),
/// with a gradient whose sums are exact: f's own derivative runs on every slice of the gradient.
/// Differentiable any number of times.
/// @param f  called two or three times, on float64
at::Tensor with_exact_gradient(const at::Tensor& x,
                               const std::function<at::Tensor(const at::Tensor&)>& f);

}  // namespace shardfield::ops
