#include "shardfield/dispatch/tensor_lists.h"

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::dispatch {

namespace {

using at::Tensor;
using tensor::is_sharded;
using torch::jit::Stack;

struct ListArgument {
  size_t index = 0;
  bool written = false;
  std::vector<Tensor> tensors;
};

/// A written tensor of another layout than its leader: its moved copy is written, then put back.
struct Moved {
  Tensor target, piece;
  const spec::Layout* layout;
};

std::vector<ListArgument> list_arguments(const c10::OperatorHandle& op, const Stack& stack) {
  const auto& arguments = op.schema().arguments();
  const size_t base = stack.size() - arguments.size();
  std::vector<ListArgument> lists;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& v = stack[base + i];
    if (!v.isTensorList()) continue;
    const auto* alias = arguments[i].alias_info();
    lists.push_back({base + i, alias && alias->isWrite(), v.toTensorVector()});
  }
  return lists;
}

/// The tensor whose layout entry k takes; undefined when nothing there is sharded.
Tensor leader(const std::vector<ListArgument>& lists, size_t k) {
  for (const bool written : {true, false})
    for (const ListArgument& list : lists)
      if (list.written == written && k < list.tensors.size() && is_sharded(list.tensors[k]))
        return list.tensors[k];
  return {};
}

bool writes_plain(const std::vector<ListArgument>& lists, size_t k, const Tensor& lead) {
  for (const ListArgument& list : lists)
    if (list.written && k < list.tensors.size() && !is_sharded(list.tensors[k]) &&
        list.tensors[k].sizes() == lead.sizes())
      return true;
  return false;
}

}  // namespace

bool is_list_op(const std::string& name) {
  if (name.starts_with("aten::_foreach_powsum")) return false;  // a reduction
  for (const char* prefix :
       {"aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd", "aten::_fused_adagrad"})
    if (name.starts_with(prefix)) return true;
  return false;
}

void list_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const char* name = op.schema().name().c_str();
  const comm::CallScope scope(name);
  std::vector<ListArgument> lists = list_arguments(op, *stack);
  const size_t count = lists.empty() ? 0 : lists[0].tensors.size();
  std::vector<Tensor> leaders(count);
  std::vector<Moved> moved;
  for (size_t k = 0; k < count; ++k) {
    const Tensor lead = leader(lists, k);
    if (!lead.defined()) continue;
    const bool plain = writes_plain(lists, k, lead);
    for (ListArgument& list : lists) {
      if (k >= list.tensors.size()) continue;
      Tensor& t = list.tensors[k];
      SHARDFIELD_CHECK(!plain || !list.written || !is_sharded(t), name, "entry ", k,
                       " is written both as a plain and as a sharded tensor; make both ",
                       tensor::describe(lead));
      if (list.written) tensor::check_writable(t, name);
      // Written tensors give their own memory; the others are read in the leader's layout.
      const Tensor before = t;
      if (plain) {
        t = tensor::gather(t);
      } else if (is_sharded(t) && &tensor::layout_of(t) == &tensor::layout_of(lead)) {
        t = tensor::piece_of(t);
      } else {
        t = tensor::piece_for(t, tensor::layout_of(lead), lead.sizes());
        if (list.written && is_sharded(before))
          moved.push_back({before, t, &tensor::layout_of(lead)});
      }
    }
    if (!plain) leaders[k] = lead;
  }
  for (const ListArgument& list : lists) (*stack)[list.index] = list.tensors;
  const size_t base = stack->size() - op.schema().arguments().size();
  for (size_t i = base; i < stack->size(); ++i) {
    const c10::IValue& v = (*stack)[i];
    if (v.isTensor() && is_sharded(v.toTensor())) (*stack)[i] = tensor::gather(v.toTensor());
  }
  op.callBoxed(stack);
  for (Moved& m : moved) m.target.copy_(tensor::make_sharded(m.piece, m.layout, m.target.sizes()));
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    if (!(*stack)[i].isTensorList()) continue;
    auto results = (*stack)[i].toTensorVector();
    for (size_t k = 0; k < results.size() && k < count; ++k)
      if (leaders[k].defined())
        results[k] =
            tensor::make_sharded(results[k], &tensor::layout_of(leaders[k]), leaders[k].sizes());
    (*stack)[i] = results;
  }
}

void formula_of_lists(const c10::OperatorHandle& op, c10::DispatchKeySet keys, Stack* stack) {
  std::vector<NodePointer> keep;
  if (at::GradMode::is_enabled()) {
    for (const ListArgument& list : list_arguments(op, *stack))
      for (const Tensor& t : list.tensors)
        if (is_sharded(t)) keep.push_back(prepare_leaf(t));
  }
  op.redispatchBoxed(formula_keys(keys), stack);
}

}  // namespace shardfield::dispatch
