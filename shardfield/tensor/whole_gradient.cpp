#include "shardfield/tensor/whole_gradient.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/comm/backward_scope.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/gathered_gradient.h"

namespace shardfield::tensor {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

struct WholeGradientFn : torch::autograd::Function<WholeGradientFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& plain) {
    comm::remember_scope(ctx);
    return plain.detach();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    return {gathered_gradient(grads[0])};
  }
};

struct CutGradientFn : torch::autograd::Function<CutGradientFn> {
  static at::Tensor forward(AutogradContext* ctx, const at::Tensor& x) {
    comm::remember_scope(ctx);
    ctx->saved_data["layout"] = reinterpret_cast<int64_t>(&layout_of(x));
    return x.detach();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    return {redistribute(grads[0],
                         reinterpret_cast<const spec::Layout*>(ctx->saved_data["layout"].toInt()))};
  }
};

}  // namespace

at::Tensor with_whole_gradient(const at::Tensor& plain) {
  if (!plain.defined() || is_sharded(plain) || !comm::records_grad(plain)) return plain;
  return WholeGradientFn::apply(plain);
}

std::optional<at::Tensor> with_whole_gradient(const std::optional<at::Tensor>& plain) {
  return plain.has_value() ? std::optional(with_whole_gradient(*plain)) : plain;
}

at::Tensor with_own_gradient(const at::Tensor& t) {
  if (!comm::records_grad(t)) return t;
  return is_sharded(t) ? CutGradientFn::apply(t) : WholeGradientFn::apply(t);
}

}  // namespace shardfield::tensor
