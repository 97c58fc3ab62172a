#pragma once

#include <memory>
#include <utility>

#include <ATen/core/ivalue.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/comm/backward_scope.h"

namespace shardfield::exchange {

/// The exchange that a node holds.
template <class Exchange>
struct HeldExchange : torch::CustomClassHolder {
  std::shared_ptr<const Exchange> exchange;

  static void save(torch::autograd::AutogradContext* ctx,
                   std::shared_ptr<const Exchange> exchange) {
    auto held = c10::make_intrusive<HeldExchange>();
    held->exchange = std::move(exchange);
    ctx->saved_data["exchange"] = c10::IValue::make_capsule(std::move(held));
  }
  static std::shared_ptr<const Exchange> saved(torch::autograd::AutogradContext* ctx) {
    return c10::static_intrusive_pointer_cast<HeldExchange>(ctx->saved_data["exchange"].toCapsule())
        ->exchange;
  }
};

/// The node of an exchange's forward() or adjoint(); the backward of each is the other, so any
/// order of derivative works.
template <class Exchange>
struct ExchangeFn : torch::autograd::Function<ExchangeFn<Exchange>> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& in,
                            std::shared_ptr<const Exchange> exchange, bool adjoint) {
    comm::remember_scope(ctx);
    const at::Tensor out = adjoint ? exchange->adjoint(in) : exchange->forward(in);
    ctx->saved_data["adjoint"] = adjoint;
    HeldExchange<Exchange>::save(ctx, std::move(exchange));
    return out.is_same(in) ? in.detach() : out;
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const comm::BackwardScope scope(ctx);
    const auto exchange = HeldExchange<Exchange>::saved(ctx);
    const bool adjoint = !ctx->saved_data["adjoint"].toBool();
    if (comm::records_grad(grads[0]))
      return {ExchangeFn::apply(grads[0], exchange, adjoint), {}, {}};
    return {adjoint ? exchange->adjoint(grads[0]) : exchange->forward(grads[0]), {}, {}};
  }
};

}  // namespace shardfield::exchange
