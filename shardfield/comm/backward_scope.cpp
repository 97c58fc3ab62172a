#include "shardfield/comm/backward_scope.h"

namespace shardfield::comm {

bool records_grad(const at::Tensor& t) {
  return t.defined() && t.requires_grad() && at::GradMode::is_enabled() &&
         !c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality);
}

void remember_scope(torch::autograd::AutogradContext* ctx) {
  if (!is_recording() || !current_op()) return;
  ctx->saved_data["op"] = reinterpret_cast<int64_t>(current_op());
  ctx->saved_data["layer"] = current_layer();
}

BackwardScope::BackwardScope(torch::autograd::AutogradContext* ctx) {
  const auto it = ctx->saved_data.find("op");
  if (it == ctx->saved_data.end()) return;
  scope_.emplace(reinterpret_cast<const char*>(it->second.toInt()),
                 static_cast<int>(ctx->saved_data["layer"].toInt()));
}

}  // namespace shardfield::comm
