// Pointwise functions that need more than the rule for elementwise ops.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using tensor::impl_of;
using tensor::is_sharded;
using tensor::piece_of;

// log_sigmoid keeps a buffer for its derivative: elementwise on CPU, empty on CUDA.

std::tuple<Tensor, Tensor> log_sigmoid_forward(const Tensor& x) {
  auto [out, buffer] = at::log_sigmoid_forward(piece_of(x));
  if (buffer.sizes() == out.sizes()) buffer = tensor::make_like(std::move(buffer), impl_of(x));
  return {tensor::make_like(std::move(out), impl_of(x)), buffer};
}

Tensor log_sigmoid_backward(const Tensor& grad, const Tensor& x, const Tensor& buffer) {
  const spec::Layout& layout = tensor::layout_of(is_sharded(x) ? x : grad);
  const Tensor input = tensor::redistribute(x, &layout);
  const Tensor kept = is_sharded(buffer) ? piece_of(buffer) : buffer;
  Tensor out =
      at::log_sigmoid_backward(tensor::piece_for(grad, layout, x.sizes()), piece_of(input), kept);
  return tensor::make_like(std::move(out), impl_of(input));
}

/// The halves along a cut dim lie on different ranks; the second follows the first.
Tensor glu(const Tensor& x, int64_t dim) {
  TORCH_CHECK(x.dim() > 0, "glu does not support 0-dimensional tensors");
  const int64_t d = at::maybe_wrap_dim(dim, x.dim());
  TORCH_CHECK(x.size(d) % 2 == 0, "Halving dimension must be even, but dimension ", d, " is size ",
              x.size(d));
  const int64_t half = x.size(d) / 2;
  return x.narrow(d, 0, half) * at::sigmoid(x.narrow(d, half, half));
}

// PyTorch's derivative formulas of these two make plain zeros of the sharded input's size.

Tensor prelu_kernel(const Tensor& x, const Tensor& weight) {
  return at::where(x >= 0, x, weight * x);
}

Tensor copysign(const Tensor& magnitude, const Tensor& sign) {
  auto type = at::result_type(magnitude, sign);
  if (at::isIntegralType(type, true)) type = c10::typeMetaToScalarType(at::get_default_dtype());
  const Tensor size = magnitude.to(type).abs();
  return at::where(at::signbit(sign.detach()), -size, size);
}

}  // namespace

SHARDFIELD_OPS(activation) {
  table.composed("aten::glu", TORCH_FN(glu));
  table.composed("aten::_prelu_kernel", TORCH_FN(prelu_kernel));
  table.composed("aten::copysign.Tensor", TORCH_FN(copysign));
  table.backend("aten::log_sigmoid_forward", TORCH_FN(log_sigmoid_forward));
  table.backend("aten::log_sigmoid_backward", TORCH_FN(log_sigmoid_backward));
}

}  // namespace shardfield::ops
