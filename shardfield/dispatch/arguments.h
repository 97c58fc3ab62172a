#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::dispatch {

/// The arguments of one boxed call on the stack.
class Arguments {
 public:
  Arguments(const c10::OperatorHandle& op, torch::jit::Stack* stack)
      : schema_(op.schema()),
        stack_(stack),
        count_(schema_.arguments().size()),
        base_(stack->size() - count_) {}

  size_t size() const { return count_; }
  c10::IValue& operator[](size_t i) const { return (*stack_)[base_ + i]; }
  bool is_written(size_t i) const {
    const auto* alias = schema_.arguments()[i].alias_info();
    return alias && alias->isWrite();
  }
  /// Calls f(tensor) for every defined tensor among the arguments, lists included.
  template <class F>
  void for_each_tensor(F&& f) const {
    for (size_t i = 0; i < count_; ++i) {
      const c10::IValue& value = (*this)[i];
      if (value.isTensor()) {
        if (value.toTensor().defined()) f(i, value.toTensor());
      } else if (value.isTensorList()) {
        for (const at::Tensor& t : value.toTensorVector())
          if (t.defined()) f(i, t);
      } else if (value.isList()) {
        for (const c10::IValue& e : value.toListRef())
          if (e.isTensor() && e.toTensor().defined()) f(i, e.toTensor());
      }
    }
  }
  bool writes_plain() const {
    bool plain = false;
    for_each_tensor(
        [&](size_t i, const at::Tensor& t) { plain |= is_written(i) && !tensor::is_sharded(t); });
    return plain;
  }

 private:
  const c10::FunctionSchema& schema_;
  torch::jit::Stack* stack_;
  size_t count_;
  size_t base_;
};

}  // namespace shardfield::dispatch
