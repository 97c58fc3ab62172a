// Conjugate and negative views. PyTorch marks them by a bit on the tensor that kernels resolve; a
// sharded tensor gets the values at once, as a view that refuses writes.

#include <ATen/ATen.h>

#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::ops {

namespace {

using at::Tensor;

Tensor conj_values(const Tensor& x) {
  return tensor::as_moved_view(at::conj_physical(x));
}
Tensor neg_values(const Tensor& x) {
  return tensor::as_moved_view(at::neg(x));
}

}  // namespace

SHARDFIELD_OPS(complex) {
  table.composed("aten::_conj", TORCH_FN(conj_values));
  table.composed("aten::_neg_view", TORCH_FN(neg_values));
}

}  // namespace shardfield::ops
