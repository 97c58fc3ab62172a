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

/// Does the same for the node of PyTorch's own formula that made `result`, while a recorder is
/// active.
void remember_formula(const at::Tensor& result);

/// The scope of one kernel: names the op, counts a call when no other op is being run, and inside
/// the backward of a remembered formula charges that op and layer.
class CallScope {
 public:
  explicit CallScope(const char* op);

 private:
  std::optional<OpScope> scope_;
};

}  // namespace shardfield::comm
