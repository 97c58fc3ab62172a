#include "shardfield/dispatch/elementwise.h"

#include <array>
#include <map>

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/variable.h>

#include "shardfield/comm/traffic.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/reproducible.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::dispatch {

namespace {

using at::Tensor;
using c10::DispatchKeySet;
using tensor::impl_of;
using tensor::is_sharded;
using tensor::ShardTensorImpl;

template <class T>
constexpr bool is_tensor_arg = std::is_same_v<std::decay_t<T>, Tensor>;

/// The sharded operand all others must agree with; cleared when the short cut does not apply.
struct Common {
  const ShardTensorImpl* ref = nullptr;
  bool fits = true;
  DispatchKeySet piece_keys;

  void operator()(const Tensor& t) {
    if (!t.defined()) {
      fits = false;
    } else if (!is_sharded(t)) {
      fits &= t.dim() == 0;
      piece_keys = piece_keys | t.key_set();
    } else {
      const ShardTensorImpl* impl = impl_of(t);
      piece_keys = piece_keys | impl->piece().key_set();
      if (!ref) {
        ref = impl;
        fits &= impl->is_non_overlapping_and_dense();
      } else {
        fits &= impl->piece_layout() == ref->piece_layout() && impl->sizes() == ref->sizes();
      }
    }
  }
  template <class T>
    requires(!is_tensor_arg<T>)
  void operator()(const T&) {}
};

inline const Tensor& piece_or_self(const Tensor& t) {
  return is_sharded(t) ? impl_of(t)->piece() : t;
}

template <class A>
decltype(auto) as_piece(A& a) {
  if constexpr (std::is_same_v<std::remove_cvref_t<A>, Tensor>) {
    // In-place ops take Tensor&; the piece handle is const, the tensor it names is written.
    if constexpr (!std::is_const_v<std::remove_reference_t<A>>) {
      return const_cast<Tensor&>(
          piece_or_self(a));  // NOLINT(cppcoreguidelines-pro-type-const-cast)
    } else {
      return piece_or_self(a);
    }
  } else {
    return (a);
  }
}

template <class First, class... Rest>
First& first_of(First& first, Rest&...) {
  return first;
}

template <class R, class... A>
R call_boxed(void (*kernel)(const c10::OperatorHandle&, torch::jit::Stack*),
             const c10::OperatorHandle& op, A&... a) {
  torch::jit::Stack stack;
  stack.reserve(sizeof...(A));
  (stack.emplace_back(a), ...);
  kernel(op, &stack);
  if constexpr (std::is_reference_v<R>) {
    return first_of(a...);
  } else {
    return std::move(stack.front()).toTensor();
  }
}

template <class Signature>
struct Backend;

/// At PrivateUse3.
template <class R, class... A>
struct Backend<R(A...)> final : c10::OperatorKernel {
  c10::TypedOperatorHandle<R(A...)> op;
  explicit Backend(c10::TypedOperatorHandle<R(A...)> handle) : op(std::move(handle)) {}

  R operator()(A... a) {
    Common common;
    (common(a), ...);
    if (C10_UNLIKELY(!common.fits || !common.ref || comm::is_recording() || is_reproducible())) {
      return call_boxed<R>(&elementwise_kernel, op, a...);
    }
    const DispatchKeySet keys = common.piece_keys & c10::after_ADInplaceOrView_keyset;
    if constexpr (std::is_reference_v<R>) {
      if (!is_sharded(first_of(a...))) return call_boxed<R>(&elementwise_kernel, op, a...);
      if (C10_UNLIKELY(impl_of(first_of(a...))->is_moved_view()))
        tensor::check_writable(first_of(a...), op.schema().name().c_str());
      op.redispatch(keys, as_piece<std::remove_reference_t<A>>(a)...);
      return first_of(a...);
    } else {
      return tensor::make_like(
          op.redispatch(keys, as_piece<const std::remove_reference_t<A>>(a)...), common.ref);
    }
  }
};

/// True when a derivative through the argument may be asked for.
inline bool is_recorded(const Tensor& t, bool grad_mode) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(t);
  if (!meta) return false;
  return has_tangent(t) || (grad_mode && (meta->requires_grad_ || meta->grad_fn_));
}
template <class T>
  requires(!is_tensor_arg<T>)
inline bool is_recorded(const T&, bool) {
  return false;
}

/// True when a tensor argument needs nothing before PyTorch's formula; makes a sharded leaf's own
/// accumulator.
inline bool ready(const Tensor& t, const ShardTensorImpl* ref, NodePointer& keep) {
  if (!t.defined()) return true;
  auto* meta = torch::autograd::impl::get_autograd_meta(t);
  const bool wants_grad = meta && (meta->requires_grad_ || meta->grad_fn_);
  if (!is_sharded(t)) return !wants_grad || t.dim() == 0;
  if (meta && meta->requires_grad_ && !meta->grad_fn_) keep = prepare_leaf(t);
  return impl_of(t)->piece_layout() == ref->piece_layout() && impl_of(t)->sizes() == ref->sizes();
}
template <class T>
  requires(!is_tensor_arg<T>)
inline bool ready(const T&, const ShardTensorImpl*, NodePointer&) {
  return true;
}

template <class T>
void find_sharded(const T& a, const ShardTensorImpl*& ref) {
  if constexpr (is_tensor_arg<T>) {
    if (!ref && is_sharded(a)) ref = impl_of(a);
  }
}

template <class Signature>
struct Formula;

/// At AutogradPrivateUse3.
template <class R, class... A>
struct Formula<R(A...)> final : c10::OperatorKernel {
  c10::TypedOperatorHandle<R(A...)> op;
  explicit Formula(c10::TypedOperatorHandle<R(A...)> handle) : op(std::move(handle)) {}

  R operator()(DispatchKeySet keys, A... a) {
    if constexpr (!std::is_reference_v<R>) {
      const bool grad_mode = at::GradMode::is_enabled();
      if (!(is_recorded(a, grad_mode) || ...))
        return op.redispatch(DispatchKeySet(c10::DispatchKey::PrivateUse3), std::forward<A>(a)...);
    }
    const ShardTensorImpl* ref = nullptr;
    (find_sharded(a, ref), ...);
    std::array<NodePointer, sizeof...(A)> keep;
    bool fits = ref != nullptr;
    if constexpr (std::is_reference_v<R>) fits = fits && is_sharded(first_of(a...));
    if (fits && at::GradMode::is_enabled()) {
      size_t i = 0;
      ((fits = ready(a, ref, keep[i++]) && fits), ...);
    }
    if (C10_LIKELY(fits)) return op.redispatch(formula_keys(keys), std::forward<A>(a)...);
    torch::jit::Stack stack;
    (stack.emplace_back(a), ...);
    formula_of_elementwise(op, keys, &stack);
    if constexpr (std::is_reference_v<R>) {
      return first_of(a...);
    } else {
      return std::move(stack.front()).toTensor();
    }
  }
};

using Register = void (*)(const c10::OperatorHandle&, const char*, torch::Library&, torch::Library&,
                          bool);

template <class Signature>
struct Registrar;
template <class R, class... A>
struct Registrar<R(A...)> {
  static void run(const c10::OperatorHandle& op, const char* name, torch::Library& backend,
                  torch::Library& autograd, bool has_formula) {
    const auto typed = op.typed<R(A...)>();
    auto kernel = std::make_shared<Backend<R(A...)>>(typed);
    backend.impl(name, torch::CppFunction(
                           [kernel](A... a) -> R { return (*kernel)(std::forward<A>(a)...); }));
    if (!has_formula) return;
    auto formula = std::make_shared<Formula<R(A...)>>(typed);
    autograd.impl(name, torch::CppFunction([formula](DispatchKeySet keys, A... a) -> R {
                    return (*formula)(keys, std::forward<A>(a)...);
                  }));
  }
};

/// Argument types of a schema as one string; "!" marks written ones.
std::string signature_key(const c10::FunctionSchema& schema) {
  std::string key;
  for (const auto& arg : schema.arguments()) {
    const bool written = arg.alias_info() && arg.alias_info()->isWrite();
    key += arg.type()->str() + (written ? "!," : ",");
  }
  return key;
}

const std::map<std::string, Register>& registrars() {
  using T = const Tensor&;
  using S = const at::Scalar&;
  using OS = const std::optional<at::Scalar>&;
  static const std::map<std::string, Register> table = {
      {"Tensor,", &Registrar<Tensor(T)>::run},
      {"Tensor,Tensor,", &Registrar<Tensor(T, T)>::run},
      {"Tensor,Tensor,Tensor,", &Registrar<Tensor(T, T, T)>::run},
      {"Tensor,Scalar,", &Registrar<Tensor(T, S)>::run},
      {"Tensor,Scalar,Scalar,", &Registrar<Tensor(T, S, S)>::run},
      {"Tensor,Tensor,Scalar,", &Registrar<Tensor(T, T, S)>::run},
      {"Tensor,Tensor,Tensor,Scalar,", &Registrar<Tensor(T, T, T, S)>::run},
      {"Tensor,str,", &Registrar<Tensor(T, c10::string_view)>::run},
      {"Tensor,Tensor,str,", &Registrar<Tensor(T, T, c10::string_view)>::run},
      {"Tensor,Scalar?,Scalar?,", &Registrar<Tensor(T, OS, OS)>::run},
      {"Tensor!,", &Registrar<Tensor&(Tensor&)>::run},
      {"Tensor!,Tensor,", &Registrar<Tensor&(Tensor&, T)>::run},
      {"Tensor!,Scalar,", &Registrar<Tensor&(Tensor&, S)>::run},
      {"Tensor!,Scalar,Scalar,", &Registrar<Tensor&(Tensor&, S, S)>::run},
      {"Tensor!,Tensor,Scalar,", &Registrar<Tensor&(Tensor&, T, S)>::run},
  };
  return table;
}

}  // namespace

bool register_unboxed(const c10::OperatorHandle& op, const char* name, torch::Library& backend,
                      torch::Library& autograd, bool has_formula) {
  const auto& returns = op.schema().returns();
  if (returns.size() != 1 || returns[0].type()->str() != "Tensor") return false;
  for (const auto& arg : op.schema().arguments())
    if (arg.is_out()) return false;
  const auto found = registrars().find(signature_key(op.schema()));
  if (found == registrars().end()) return false;
  found->second(op, name, backend, autograd, has_formula);
  return true;
}

}  // namespace shardfield::dispatch
