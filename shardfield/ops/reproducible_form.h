#pragma once

#include <optional>
#include <vector>

#include <ATen/WrapDimUtils.h>

#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/whole_gradient.h"

/// What the forms of reproducible mode are made of; see dispatch/reproducible.h.
namespace shardfield::ops {

inline bool is_given(const std::optional<at::Tensor>& t) {
  return t && t->defined();
}

/// A kernel under PyTorch's derivative formula of the op; gradients come back of their tensor's own
/// kind.
template <class Op, auto kernel, class Schema = typename Op::schema>
struct UnderFormula;
template <class Op, auto kernel, class R, class... A>
struct UnderFormula<Op, kernel, R(A...)> {
  static R run(A... a) {
    if (!at::GradMode::is_enabled() ||
        c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality))
      return kernel(a...);
    return dispatch::call_formula<Op>(with_own_gradient(a)...);
  }
  static at::Tensor with_own_gradient(const at::Tensor& t) { return tensor::with_own_gradient(t); }
  static std::optional<at::Tensor> with_own_gradient(const std::optional<at::Tensor>& t) {
    return is_given(t) ? std::optional<at::Tensor>(tensor::with_own_gradient(*t)) : t;
  }
  template <class T>
  static T with_own_gradient(const T& other) {
    return other;
  }
};

/// PyTorch's decomposition of an op; gradients come back of their tensor's own kind.
template <class Op, class Schema = typename Op::schema>
struct Decomposed;
template <class Op, class R, class... A>
struct Decomposed<Op, R(A...)> {
  static R run(A... a) { return dispatch::call_formula<Op>(tensor::with_own_gradient(a)...); }
};

/// Non-negative dims; all of them when none are given.
inline std::vector<int64_t> wrapped(at::OptionalIntArrayRef dims, int64_t ndim) {
  std::vector<int64_t> result;
  if (dims && !dims->empty()) {
    result = dims->vec();
    for (int64_t& d : result) d = at::maybe_wrap_dim(d, ndim);
  } else {
    for (int64_t d = 0; d < ndim; ++d) result.push_back(d);
  }
  return result;
}

/// Elements that a reduction over dims takes together.
inline int64_t count_of(const at::Tensor& x, const std::vector<int64_t>& dims) {
  int64_t count = 1;
  for (const int64_t d : dims) count *= x.size(d);
  return count;
}

}  // namespace shardfield::ops
