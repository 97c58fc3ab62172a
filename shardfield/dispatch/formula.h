#pragma once

#include <algorithm>

#include <ATen/core/IListRef.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/AutogradState.h>

#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/leaf_gradient.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::dispatch {

/// Keys that lead from AutogradPrivateUse3 to PyTorch's own derivative kernel of the op
/// (AutogradOther holds it) and from there to PrivateUse3.
inline c10::DispatchKeySet formula_keys(c10::DispatchKeySet keys) {
  return (keys - c10::DispatchKeySet(c10::DispatchKey::AutogradFunctionality))
      .add(c10::DispatchKey::AutogradOther);
}

inline const at::Tensor& first_result(const at::Tensor& result) {
  return result;
}
template <class... T>
const at::Tensor& first_result(const std::tuple<T...>& results) {
  return std::get<0>(results);
}

/// Runs PyTorch's own formula of an op from a kernel above autograd, e.g.
/// call_formula<at::_ops::native_layer_norm>(x, ...): unboxed, which costs half of the boxed way.
/// The report charges its backward to the op and layer of this call.
template <class Op, class... Args>
auto call_formula(const at::Tensor& x, Args&&... args) {
  constexpr c10::DispatchKeySet keys =
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse3).add(c10::DispatchKey::AutogradOther);
  const auto keep = prepare_leaf(x);
  auto result = Op::redispatch(keys, x, std::forward<Args>(args)...);
  comm::remember_formula(first_result(result));
  return result;
}

/// True when a forward-mode tangent hangs on an argument.
inline bool has_tangent(const at::Tensor& t) {
  return t.defined() && t._fw_grad(0).defined();
}
inline bool has_tangent(const std::optional<at::Tensor>& t) {
  return t.has_value() && has_tangent(*t);
}
inline bool has_tangent(at::TensorList list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& t) { return has_tangent(t); });
}
inline bool has_tangent(const at::ITensorListRef& list) {
  return std::any_of(list.begin(), list.end(), [](const at::Tensor& t) { return has_tangent(t); });
}
inline bool has_tangent(const c10::List<std::optional<at::Tensor>>& list) {
  return std::any_of(list.begin(), list.end(),
                     [](const std::optional<at::Tensor>& t) { return has_tangent(t); });
}
template <class T>
bool has_tangent(const T&) {
  return false;
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

/// Keys below PyTorch's derivative kernels: those that remember what a view is a view of, and ours.
inline c10::DispatchKeySet view_keys(c10::DispatchKeySet keys) {
  return keys - c10::DispatchKeySet(c10::DispatchKey::AutogradFunctionality);
}

/// True when no derivative of a view of x can be asked for. PyTorch then refuses later in-place
/// writes that record, so that the view is never rebuilt.
inline bool is_view_unrecorded(const at::Tensor& x) {
  return !at::GradMode::is_enabled() && !has_tangent(x);
}

/// Runs PyTorch's formula of a view op, view replay on.
template <class Handle, class Self, class... Args>
decltype(auto) call_view_formula(const Handle& op, c10::DispatchKeySet keys, Self&& x,
                                 Args&&... args) {
  if (is_view_unrecorded(x))
    return op.redispatch(view_keys(keys), std::forward<Self>(x), std::forward<Args>(args)...);
  const auto keep = prepare_leaf(x);
  const ViewReplay replay;
  return op.redispatch(formula_keys(keys), std::forward<Self>(x), std::forward<Args>(args)...);
}

/// The same by name, e.g. call_view_formula<at::_ops::expand>(keys, x, ...).
template <class Op, class... Args>
at::Tensor call_view_formula(c10::DispatchKeySet keys, const at::Tensor& x, Args&&... args) {
  if (is_view_unrecorded(x)) return Op::redispatch(view_keys(keys), x, std::forward<Args>(args)...);
  const auto keep = prepare_leaf(x);
  const ViewReplay replay;
  return Op::redispatch(formula_keys(keys), x, std::forward<Args>(args)...);
}

}  // namespace shardfield::dispatch
