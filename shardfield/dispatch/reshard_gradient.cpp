#include "shardfield/dispatch/reshard_gradient.h"

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include "shardfield/base/torch_version.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::dispatch {

namespace {

using torch::autograd::Edge;
using torch::autograd::Node;
using torch::autograd::variable_list;

struct ReshardGradient final : Node {
  const spec::Layout* layout;

  explicit ReshardGradient(const spec::Layout* source_layout) : layout(source_layout) {}

  variable_list apply(variable_list&& grads) override {
    variable_list moved;
    for (const at::Tensor& g : grads) moved.push_back(tensor::redistribute(g, layout));
    return moved;
  }
  std::string name() const override { return "ReshardGradient"; }
};

}  // namespace

void reshard_gradient(const at::Tensor& result, const at::Tensor& source) {
  if (!result.requires_grad() || !source.requires_grad() || !result.grad_fn()) return;
  const auto& formula = result.grad_fn();
  if (formula->num_outputs() == 0) return;
  auto node = make_node<ReshardGradient>(&tensor::layout_of(source));
  node->add_next_edge(formula->next_edge(0));
  node->add_input_metadata(source);
  formula->set_next_edge(0, Edge(std::move(node), 0));
}

}  // namespace shardfield::dispatch
