#include "shardfield/dispatch/leaf_gradient.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/variable.h>

#include "shardfield/tensor/autograd.h"

namespace shardfield::dispatch {

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::variable_list;

struct ShardAccumulateGrad final : AccumulateGrad {
  using AccumulateGrad::AccumulateGrad;

  variable_list apply(variable_list&& grads) override {
    if (!tensor::is_sharded(variable)) return AccumulateGrad::apply(std::move(grads));
    const spec::Layout* layout = &tensor::layout_of(variable);
    at::Tensor& old = variable.mutable_grad();
    // A plain x.grad put there by the user would swallow the sharded one.
    if (old.defined() && !tensor::is_sharded(old)) old = tensor::redistribute(old, layout);
    variable_list moved;
    for (at::Tensor& g : grads) moved.push_back(g.defined() ? tensor::redistribute(g, layout) : g);
    grads.clear();
    return AccumulateGrad::apply(std::move(moved));
  }
};

}  // namespace

NodePointer prepare_leaf(const at::Tensor& t) {
  if (!t.requires_grad() || !t.is_leaf() || !at::GradMode::is_enabled()) return {};
  if (torch::autograd::impl::try_get_grad_accumulator(t)) return {};
  NodePointer node = make_node<ShardAccumulateGrad>(t);
  torch::autograd::impl::set_grad_accumulator(t, WeakNodePointer(node));
  return node;
}

}  // namespace shardfield::dispatch
