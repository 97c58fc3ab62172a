#pragma once

#include <optional>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

/// True when autograd records here for t: grad mode on, above autograd, t requires grad.
bool records_grad(const at::Tensor& t);

/// Stores the current op and layer in a node, so that its backward traffic is charged to them.
void remember_scope(torch::autograd::AutogradContext* ctx);

/// Restores what remember_scope stored, for the length of a backward call.
class BackwardScope {
 public:
  explicit BackwardScope(torch::autograd::AutogradContext* ctx);

 private:
  std::optional<OpScope> scope_;
};

}  // namespace shardfield::comm
