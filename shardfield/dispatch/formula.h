#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/AutogradState.h>

#include "shardfield/dispatch/leaf_gradient.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::dispatch {

/// Keys that lead from AutogradPrivateUse3 to PyTorch's own derivative kernel of the op
/// (AutogradOther holds it) and from there to PrivateUse3.
inline c10::DispatchKeySet formula_keys(c10::DispatchKeySet keys) {
  return (keys - c10::DispatchKeySet(c10::DispatchKey::AutogradFunctionality))
      .add(c10::DispatchKey::AutogradOther);
}

/// Makes views replay their own op instead of as_strided when they are rebuilt (CopySlices).
class ViewReplay {
 public:
  ViewReplay() : before_(c10::AutogradState::get_tls_state().get_view_replay_enabled()) {
    c10::AutogradState::get_tls_state().set_view_replay_enabled(true);
  }
  ~ViewReplay() { c10::AutogradState::get_tls_state().set_view_replay_enabled(before_); }
  ViewReplay(const ViewReplay&) = delete;
  ViewReplay& operator=(const ViewReplay&) = delete;

 private:
  bool before_;
};

/// Runs PyTorch's formula of a view op, view replay on.
template <class Handle, class Self, class... Args>
decltype(auto) call_view_formula(const Handle& op, c10::DispatchKeySet keys, Self&& x,
                                 Args&&... args) {
  const auto keep = prepare_leaf(x);
  const ViewReplay replay;
  return op.redispatch(formula_keys(keys), std::forward<Self>(x), std::forward<Args>(args)...);
}

/// The same by name, e.g. call_view_formula<at::_ops::expand>(keys, x, ...).
template <class Op, class... Args>
at::Tensor call_view_formula(c10::DispatchKeySet keys, const at::Tensor& x, Args&&... args) {
  const auto keep = prepare_leaf(x);
  const ViewReplay replay;
  return Op::redispatch(formula_keys(keys), x, std::forward<Args>(args)...);
}

}  // namespace shardfield::dispatch
