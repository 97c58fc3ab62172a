// log_sigmoid keeps a buffer for its derivative: elementwise on CPU, empty on CUDA.

#include <ATen/ATen.h>

#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using tensor::impl_of;
using tensor::is_sharded;
using tensor::piece_of;

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

}  // namespace

SHARDFIELD_OPS(log_sigmoid) {
  table.backend("aten::log_sigmoid_forward", TORCH_FN(log_sigmoid_forward));
  table.backend("aten::log_sigmoid_backward", TORCH_FN(log_sigmoid_backward));
}

}  // namespace shardfield::ops
