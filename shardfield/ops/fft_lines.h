#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace shardfield::ops {

/// A Fourier transform of plain tensors, as PyTorch's _fft_c2c, _fft_r2c and _fft_c2r have it.
struct FourierTransform {
  enum class Kind { kComplex, kToComplex, kToReal };
  Kind kind;
  int64_t norm;
  bool forward = true;   ///< of kComplex
  bool onesided = true;  ///< of kToComplex
  int64_t length = 0;    ///< of kToReal: of the result

  at::Tensor along(const at::Tensor& x, at::IntArrayRef dims) const;
};

/// The transform along one dim, line by line, each in memory of its own, for reproducible mode:
/// what FFT libraries do with a line may depend on its neighbours and on its address.
/// Differentiable any number of times, by lines too.
/// @param x  plain, with at least one line
at::Tensor transform_lines(const at::Tensor& x, int64_t dim, const FourierTransform& transform);

}  // namespace shardfield::ops
