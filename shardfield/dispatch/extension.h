#pragma once

#include <torch/library.h>

#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/boxed.h"

namespace shardfield::dispatch {

/// Sharded kernels from outside of this library: for the ops of another library, or in place of the
/// rules here (the last one registered wins). They hold as long as the object lives. Make it with
/// SHARDFIELD_EXTENSION, in any program or shared library that links Shardfield.
class Extension {
 public:
  /// @param ns  namespace of the ops: the one of their TORCH_LIBRARY, or "aten"
  explicit Extension(const char* ns)
      : autograd_(torch::Library::IMPL, ns, c10::DispatchKey::AutogradPrivateUse3, __FILE__,
                  __LINE__),
        backend_(torch::Library::IMPL, ns, c10::DispatchKey::PrivateUse3, __FILE__, __LINE__) {}

  /// An op written out of differentiable parts (tensor/autograd.h, exchange/rows.h, the op itself
  /// on pieces): derivatives of any order follow. Called when an argument is sharded.
  /// @param name      without the namespace, e.g. "flux" or "add.Tensor"; a literal
  /// @param function  TORCH_FN(f), f with the C++ signature of the op
  template <class F>
  void composed(const char* name, F function) {
    autograd_.impl(name, scoped(name, function));
    backend_.impl(name, scoped(name, function));
  }

  /// A kernel below the derivative formula that the op brings along (its Autograd kernel). The ops
  /// the formula calls in turn need kernels too, and return plain gradients of plain tensors that
  /// are summed over the mesh.
  template <class F>
  void backend(const char* name, F function) {
    autograd_.impl(name, torch::CppFunction::makeFromBoxedFunction<&formula>());
    backend_.impl(name, scoped(name, function));
  }

 private:
  template <class F>
  static torch::CppFunction scoped(const char* name, F) {
    return scoped_impl<F>(name, static_cast<typename F::FuncType*>(nullptr));
  }
  template <class F, class R, class... A>
  static torch::CppFunction scoped_impl(const char* name, R (*)(A...)) {
    return torch::CppFunction([name](A... args) -> R {
      const comm::CallScope scope(name);  // the report charges what it sends to the op
      return (*F::func_ptr())(std::forward<A>(args)...);
    });
  }

  torch::Library autograd_;
  torch::Library backend_;
};

}  // namespace shardfield::dispatch

/// Opens the registration block of a namespace of ops, once per namespace and file:
/// SHARDFIELD_EXTENSION(myns, ops) { ops.composed("flux", TORCH_FN(sharded_flux)); }
#define SHARDFIELD_EXTENSION(ns, ops)                                                \
  static void shardfield_extension_##ns(::shardfield::dispatch::Extension& ops);     \
  static const ::shardfield::dispatch::Extension shardfield_extension_of_##ns = [] { \
    ::shardfield::dispatch::Extension extension(#ns);                                \
    shardfield_extension_##ns(extension);                                            \
    return extension;                                                                \
  }();                                                                               \
  static void shardfield_extension_##ns(::shardfield::dispatch::Extension& ops)
