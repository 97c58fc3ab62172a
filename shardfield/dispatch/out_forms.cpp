#include "shardfield/dispatch/out_forms.h"

#include <map>
#include <unordered_map>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::dispatch {

namespace {

using at::Tensor;
using c10::FunctionSchema;
using c10::OperatorHandle;

size_t num_outs(const FunctionSchema& schema) {
  size_t n = 0;
  for (const c10::Argument& arg : schema.arguments()) n += arg.is_out();
  return n;
}

/// Same arguments but for the outs, which come last, and as many results.
bool is_functional_form(const FunctionSchema& form, const FunctionSchema& with_out) {
  const size_t outs = num_outs(with_out);
  if (num_outs(form) != 0 || form.returns().size() != outs ||
      form.arguments().size() + outs != with_out.arguments().size())
    return false;
  for (size_t i = 0; i < form.arguments().size(); ++i) {
    const c10::Argument &a = form.arguments()[i], &b = with_out.arguments()[i];
    if (a.alias_info() || a.name() != b.name() || *a.type() != *b.type()) return false;
  }
  return true;
}

/// Functional forms by the name of the out= form, found when the kernels are registered.
std::unordered_map<c10::OperatorName, OperatorHandle>& functional_forms() {
  static auto* forms = new std::unordered_map<c10::OperatorName, OperatorHandle>();
  return *forms;
}

const std::multimap<std::string, OperatorHandle>& ops_by_name() {
  static const auto* table = [] {
    auto* by_name = new std::multimap<std::string, OperatorHandle>();
    auto& dispatcher = c10::Dispatcher::singleton();
    for (const auto& name : dispatcher.getAllOpNames())
      if (const auto op = dispatcher.findSchema(name)) by_name->emplace(name.name, *op);
    return by_name;
  }();
  return *table;
}

void store(const char* name, const Tensor& out, const Tensor& result) {
  if (!tensor::is_sharded(out)) {
    const Tensor whole = tensor::gather(result);
    if (out.sizes() != whole.sizes()) out.resize_(whole.sizes());
    out.copy_(whole);
    return;
  }
  SHARDFIELD_CHECK(out.sizes() == result.sizes(), name, "out= has sizes ", out.sizes(),
                   ", the result has ", result.sizes(), "; pass an out of the result's sizes");
  tensor::check_writable(out, name);
  out.copy_(result);
}

}  // namespace

bool has_functional_form(const OperatorHandle& op) {
  if (num_outs(op.schema()) == 0) return false;
  const auto [begin, end] = ops_by_name().equal_range(op.operator_name().name);
  for (auto it = begin; it != end; ++it) {
    if (!is_functional_form(it->second.schema(), op.schema())) continue;
    functional_forms().emplace(op.operator_name(), it->second);
    return true;
  }
  return false;
}

void out_form(const OperatorHandle& op, torch::jit::Stack* stack) {
  const std::string& name = op.schema().name();
  const size_t outs = num_outs(op.schema());
  for (size_t i = stack->size() - op.schema().arguments().size(); i < stack->size(); ++i)
    SHARDFIELD_CHECK(!(*stack)[i].isTensor() || !tensor::records_grad((*stack)[i].toTensor()), name,
                     "functions with out=... arguments don't support automatic differentiation, "
                     "but one of the arguments requires grad; use the form without out=");
  const std::vector<c10::IValue> targets(stack->end() - static_cast<int64_t>(outs), stack->end());
  stack->resize(stack->size() - outs);
  functional_forms().at(op.operator_name()).callBoxed(stack);
  for (size_t i = 0; i < outs; ++i) {
    c10::IValue& result = (*stack)[stack->size() - outs + i];
    store(name.c_str(), targets[i].toTensor(), result.toTensor());
    result = targets[i];
  }
}

}  // namespace shardfield::dispatch
