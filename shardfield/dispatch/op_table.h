#pragma once

#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include <c10/core/InferenceMode.h>
#include <torch/library.h>

#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/reproducible.h"

namespace shardfield::dispatch {

/// What an op file tells the dispatcher about its ops. Two keys matter: AutogradPrivateUse3, above
/// autograd, and PrivateUse3, the backend below it (the only one reached in inference mode).
class OpTable {
 public:
  OpTable();

  /// An op written above autograd out of differentiable parts: one function at both keys.
  template <class F>
  void composed(const char* name, F function) {
    own_.insert(name);
    autograd_.impl(name, above<F>(name, static_cast<typename F::FuncType*>(nullptr)));
    backend_.impl(name, scoped(name, function));
  }

  /// The same for a boxed function, which serves many ops.
  template <c10::BoxedKernel::BoxedKernelFunction* function>
  void composed_boxed(const char* name) {
    own_.insert(name);
    autograd_.impl(name, torch::CppFunction::makeFromBoxedFunction<function>());
    backend_.impl(name, torch::CppFunction::makeFromBoxedFunction<function>());
  }

  /// A kernel on pieces below PyTorch's own derivative formula. Plain operands that need a gradient
  /// and other layouts are aligned above autograd first when `aligns_operands`.
  template <class F>
  void backend(const char* name, F function) {
    own_.insert(name);
    backend_.impl(name, scoped(name, function));
    if (has_formula(name))
      add_backend_formula<F>(name, static_cast<typename F::FuncType*>(nullptr));
  }

  /// As backend, for elementwise ops with a hand-written kernel: operands are brought to one layout
  /// above autograd.
  template <class F>
  void elementwise(const char* name, F function) {
    own_.insert(name);
    backend_.impl(name, scoped(name, function));
    if (has_formula(name)) add_elementwise_formula(name);
  }

  /// A view: kernel on pieces, formula above it with view replay (in-place on views needs it).
  template <class F>
  void view(const char* name, F function) {
    own_.insert(name);
    backend_.impl(name, view_kernel<F>(static_cast<typename F::FuncType*>(nullptr)));
    if (!has_formula(name)) return;
    add_view_formula(name, static_cast<typename F::FuncType*>(nullptr));
  }

  /// Only above autograd; the backend kernel is left to the default rules.
  template <class F>
  void above_autograd(const char* name, F function) {
    own_autograd_.insert(name);
    autograd_.impl(name, scoped(name, function));
  }

  /// Leaves the op to PyTorch's own decomposition into ops we know.
  void decomposed(const char* name) { own_.insert(name); }

  /// How an op that is registered with `composed` or `backend` works in reproducible mode: by a
  /// function of differentiable parts, or by PyTorch's own decomposition. F has the signature of
  /// the op.
  template <class F>
  void reproducible_composed(const char* name, F) {
    (void)typed_op(name, static_cast<typename F::FuncType*>(nullptr));
    detail::reproducible_form(name).composed = reinterpret_cast<void (*)()>(F::func_ptr());
  }
  void reproducible_decomposed(const char* name) {
    detail::reproducible_form(name).decomposed = true;
  }

  /// Gives every op that no file claimed its default: elementwise by tag, else the gathering
  /// fallback.
  void fill_defaults();

 private:
  template <class F>
  static torch::CppFunction scoped(const char* name, F) {
    return scoped_impl<F>(name, static_cast<typename F::FuncType*>(nullptr));
  }
  template <class F, class R, class... A>
  static torch::CppFunction scoped_impl(const char* name, R (*)(A...)) {
    if constexpr (takes_keys<A...>) {
      return torch::CppFunction([name](A... args) -> R {
        const comm::CallScope scope(name);
        return (*F::func_ptr())(std::forward<A>(args)...);
      });
    } else {
      const auto op = typed_op(name, static_cast<R (*)(A...)>(nullptr));
      const ReproducibleForm* form = &detail::reproducible_form(name);
      return torch::CppFunction([name, op, form](A... args) -> R {
        const comm::CallScope scope(name);
        if (in_reproducible_form(form))
          return call_reproducible(op, *form, std::forward<A>(args)...);
        return (*F::func_ptr())(std::forward<A>(args)...);
      });
    }
  }
  /// A composed function at AutogradPrivateUse3. Forward-mode tangents, which its parts would drop,
  /// go through PyTorch's formula or decomposition, which know them.
  template <class F, class R, class... A>
  static torch::CppFunction above(const char* name, R (*)(A...)) {
    const auto op = typed_op(name, static_cast<R (*)(A...)>(nullptr));
    const ReproducibleForm* form = &detail::reproducible_form(name);
    const bool knows_tangents = has_derivatives(op);
    return torch::CppFunction([=](c10::DispatchKeySet keys, A... args) -> R {
      if (C10_UNLIKELY((has_tangent(args) || ...))) {
        check_forward_mode(name, knows_tangents);
        return op.redispatch(formula_keys(keys), std::forward<A>(args)...);
      }
      const comm::CallScope scope(name);
      if (in_reproducible_form(form)) return call_reproducible(op, *form, std::forward<A>(args)...);
      return (*F::func_ptr())(std::forward<A>(args)...);
    });
  }
  template <class R, class... A>
  static R call_reproducible(const c10::TypedOperatorHandle<R(A...)>& op,
                             const ReproducibleForm& form, std::type_identity_t<A>... args) {
    if (form.composed)
      return (*reinterpret_cast<R (*)(A...)>(form.composed))(std::forward<A>(args)...);
    return op.redispatch(formula_keys(c10::DispatchKeySet(c10::DispatchKey::PrivateUse3)),
                         std::forward<A>(args)...);
  }
  template <class... A>
  static constexpr bool takes_keys = (std::is_same_v<A, c10::DispatchKeySet> || ...);
  template <class R, class... A>
  static c10::TypedOperatorHandle<R(A...)> typed_op(const char* name, R (*)(A...)) {
    return find_op(name).typed<R(A...)>();
  }
  /// Under inference_mode PyTorch gives the view of an ordinary tensor that tensor's version
  /// counter, which an inference tensor cannot have: what a view kernel allocates, where elements
  /// had to move, is made ordinary then.
  template <class F, class R, class First, class... A>
  static torch::CppFunction view_kernel(R (*)(First, A...)) {
    return torch::CppFunction([](First x, A... a) -> R {
      const auto kernel = F::func_ptr();
      if (C10_LIKELY(!c10::InferenceMode::is_enabled() || x.is_inference()))
        return (*kernel)(x, std::forward<A>(a)...);
      const c10::InferenceMode ordinary(false);
      const at::NoGradGuard no_grad;
      const at::AutoDispatchBelowADInplaceOrView below;
      return (*kernel)(x, std::forward<A>(a)...);
    });
  }
  void add_elementwise_formula(const char* name);
  /// @throws c10::Error when this libtorch has no such op.
  static c10::OperatorHandle find_op(const char* name);
  /// True when PyTorch has a derivative formula or a decomposition for the op.
  static bool has_derivatives(const c10::OperatorHandle& op);
  /// @throws c10::Error when forward-mode tangents would be dropped.
  static void check_forward_mode(const char* name, bool knows_tangents);
  /// True when PyTorch has an autograd kernel for it and no file put one above it.
  bool has_formula(const char* name) const;
  /// Straight to the kernel where nothing is recorded (PyTorch's backward passes), else through
  /// PyTorch's formula.
  template <class F, class R, class... A>
  void add_backend_formula(const char* name, R (*)(A...)) {
    const auto op = typed_op(name, static_cast<R (*)(A...)>(nullptr));
    const ReproducibleForm* form = &detail::reproducible_form(name);
    const auto boxed = c10::BoxedKernel::makeFromFunction<&formula>();
    autograd_.impl(name, torch::CppFunction([=](c10::DispatchKeySet keys, A... a) -> R {
                     if (in_reproducible_form(form)) {
                       const comm::CallScope scope(name);
                       return call_reproducible(op, *form, std::forward<A>(a)...);
                     }
                     if (at::GradMode::is_enabled() || (has_tangent(a) || ...) ||
                         (std::is_same_v<A, at::Tensor&> || ...)) {
                       return c10::impl::BoxedKernelWrapper<R(A...)>::call(boxed, op, keys,
                                                                           std::forward<A>(a)...);
                     }
                     const comm::CallScope scope(name);
                     const at::AutoDispatchBelowADInplaceOrView below;
                     return (*F::func_ptr())(std::forward<A>(a)...);
                   }));
  }
  template <class R, class... A>
  void add_view_formula(const char* name, R (*)(A...)) {
    const auto op = typed_op(name, static_cast<R (*)(A...)>(nullptr));
    autograd_.impl(name, torch::CppFunction([op](c10::DispatchKeySet keys, A... a) -> R {
                     return call_view_formula(op, keys, std::forward<A>(a)...);
                   }));
  }

  torch::Library autograd_;
  torch::Library backend_;
  torch::Library autograd_fallback_;
  torch::Library backend_fallback_;
  std::set<std::string> own_, own_autograd_;
};

/// Adds an op file's block. These objects are made before the one that installs all kernels when
/// the library is loaded (see init_priority in the macro).
struct OpRegistration {
  explicit OpRegistration(void (*registration)(OpTable&));
};

/// Gives ops that other libraries have defined since the last call the gathering fallback at both
/// keys: their own CompositeExplicitAutograd kernels would win over a fallback and read the memory
/// of a tensor that has none. Ops of PyTorch's namespaces and composite ones are left alone. Local.
void cover_late_ops();

/// Opens the registration block of an op file: SHARDFIELD_OPS(conv) { table.composed(...); }
#define SHARDFIELD_OPS(family)                                                     \
  static void register_##family(::shardfield::dispatch::OpTable& table);           \
  [[gnu::init_priority(1000)]] static const ::shardfield::dispatch::OpRegistration \
      registered_##family(&register_##family);                                     \
  static void register_##family(::shardfield::dispatch::OpTable& table)

}  // namespace shardfield::dispatch
