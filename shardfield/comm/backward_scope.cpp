#include "shardfield/comm/backward_scope.h"

#include <atomic>
#include <map>
#include <mutex>

#include <torch/csrc/autograd/function.h>

namespace shardfield::comm {

namespace {

struct Origin {
  const char* op;
  int layer;
};

/// Nodes by address, with the number that tells a later node at the same address.
using Node = std::pair<const torch::autograd::Node*, uint64_t>;

std::mutex& mutex() {
  static auto* m = new std::mutex();
  return *m;
}
std::map<Node, Origin>& origins() {
  static auto* table = new std::map<Node, Origin>();
  return *table;
}

/// Backward is charged to the layer of its forward while someone counts, and told in errors while
/// layers have names.
bool is_followed() {
  return is_recording() || current_layer() != 0;
}
std::atomic<bool> any_named{false};

std::optional<Origin> origin_of_current_node() {
  if (!is_recording() && !any_named.load(std::memory_order_relaxed)) return std::nullopt;
  const auto node = torch::autograd::get_current_node();
  if (!node) return std::nullopt;
  const std::lock_guard<std::mutex> lock(mutex());
  const auto found = origins().find({node.get(), node->sequence_nr()});
  if (found == origins().end()) return std::nullopt;
  return found->second;
}

}  // namespace

bool records_grad(const at::Tensor& t) {
  return t.defined() && t.requires_grad() && at::GradMode::is_enabled() &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
}

void remember_scope(torch::autograd::AutogradContext* ctx) {
  if (!current_op() || !is_followed()) return;
  ctx->saved_data["op"] = reinterpret_cast<int64_t>(current_op());
  ctx->saved_data["layer"] = current_layer();
}

void remember_formula(const at::Tensor& result) {
  if (!current_op() || !is_followed() || !result.defined() || !result.grad_fn()) return;
  constexpr size_t kMostNodes = 100000;  // of one recording; older ones have run by then
  const std::lock_guard<std::mutex> lock(mutex());
  if (origins().size() >= kMostNodes) origins().clear();
  const auto& node = result.grad_fn();
  origins()[{node.get(), node->sequence_nr()}] = {current_op(), current_layer()};
  if (current_layer() != 0) any_named = true;
}

CallScope::CallScope(const char* op) {
  if (current_op()) {
    scope_.emplace(op);
    return;
  }
  if (const auto origin = origin_of_current_node()) {
    scope_.emplace(origin->op, origin->layer);
  } else {
    scope_.emplace(op);
    if (is_recording()) count_call(current_context());
  }
}

BackwardScope::BackwardScope(torch::autograd::AutogradContext* ctx) {
  const auto it = ctx->saved_data.find("op");
  if (it == ctx->saved_data.end()) return;
  scope_.emplace(reinterpret_cast<const char*>(it->second.toInt()),
                 static_cast<int>(ctx->saved_data["layer"].toInt()));
}

}  // namespace shardfield::comm
