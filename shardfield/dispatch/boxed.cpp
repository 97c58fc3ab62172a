#include "shardfield/dispatch/boxed.h"

#include <array>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/comm/traffic.h"
#include "shardfield/dispatch/arguments.h"
#include "shardfield/dispatch/elementwise_blocks.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/leaf_gradient.h"
#include "shardfield/dispatch/reproducible.h"
#include "shardfield/spec/range.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/whole_gradient.h"

namespace shardfield::dispatch {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;
using spec::Layout;
using tensor::impl_of;
using tensor::is_sharded;
using torch::jit::Stack;

void run_formula(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  op.redispatchBoxed(formula_keys(keys), stack);
}

using Nodes = c10::SmallVector<NodePointer, 4>;

Nodes prepare_leaves(const Arguments& args) {
  Nodes nodes;
  if (!at::GradMode::is_enabled()) return nodes;
  args.for_each_tensor([&](size_t, const Tensor& t) {
    if (!is_sharded(t)) return;
    if (auto node = prepare_leaf(t)) nodes.push_back(std::move(node));
  });
  return nodes;
}

std::vector<int64_t> broadcast_sizes(const std::vector<Tensor>& operands) {
  std::vector<int64_t> sizes;
  for (const Tensor& t : operands) sizes = at::infer_size(sizes, t.sizes());
  return sizes;
}

/// Tensor operands of an elementwise op that shape the result (not out= arguments).
std::vector<Tensor> shaping_operands(const c10::OperatorHandle& op, const Arguments& args) {
  std::vector<Tensor> operands;
  for (size_t i = 0; i < args.size(); ++i) {
    const c10::IValue& v = args[i];
    if (op.schema().arguments()[i].is_out() || !v.isTensor() || !v.toTensor().defined()) continue;
    operands.push_back(v.toTensor());
  }
  return operands;
}

bool any_grad(const std::vector<Tensor>& operands) {
  return at::GradMode::is_enabled() &&
         std::any_of(operands.begin(), operands.end(),
                     [](const Tensor& t) { return t.requires_grad(); });
}

}  // namespace

void formula(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Arguments args(op, stack);
  if (args.writes_plain()) return gather_and_call(op, stack);
  const comm::CallScope scope(op.schema().name().c_str());
  const Nodes keep = prepare_leaves(args);
  run_formula(op, keys, stack);
  if (!comm::is_recording()) return;
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i)
    if ((*stack)[i].isTensor()) comm::remember_formula((*stack)[i].toTensor());
}

void formula_of_elementwise(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  const Arguments args(op, stack);
  if (args.writes_plain()) return gather_and_call(op, stack);
  const Nodes keep = prepare_leaves(args);
  const auto operands = shaping_operands(op, args);
  if (operands.size() > 1 && any_grad(operands)) {
    const comm::OpScope scope(op.schema().name().c_str());
    const auto sizes = broadcast_sizes(operands);
    const Reference ref = reference_of(operands, sizes);
    for (size_t i = 0; ref.layout && i < args.size(); ++i) {
      c10::IValue& v = args[i];
      if (args.is_written(i) || !v.isTensor() || !v.toTensor().defined()) continue;
      const Tensor& t = v.toTensor();
      if (!is_sharded(t) && !t.requires_grad()) continue;
      const Layout* own = tensor::layout_for_operand(*ref.layout, sizes, t.sizes());
      v = own || is_sharded(t) ? tensor::redistribute(t, own) : tensor::with_whole_gradient(t);
    }
  }
  run_formula(op, keys, stack);
}

const Layout* layout_in_result(const Tensor& operand, at::IntArrayRef sizes) {
  const Layout& layout = tensor::layout_of(operand);
  const int shift = static_cast<int>(sizes.size() - operand.dim());
  bool whole = true;
  for (const spec::Cut& cut : layout.cuts())
    whole &= operand.size(cut.dim) == sizes[cut.dim + shift];
  if (!whole) return nullptr;
  if (shift == 0) return &layout;
  std::vector<int> new_dim(operand.dim());
  for (int d = 0; d < operand.dim(); ++d) new_dim[d] = d + shift;
  return spec::renumber(layout, new_dim);
}

namespace {

/// Where an operand is cut along a dim of size 1 that broadcasting lengthens, the longer dim is cut
/// instead: the one row goes to all ranks of the cut, and nobody holds more than its share of the
/// result. nullptr when a cut does not divide its whole dim.
const Layout* lengthened_layout(const Tensor& operand, at::IntArrayRef sizes) {
  const Layout& layout = tensor::layout_of(operand);
  if (!layout.is_simple(operand.sizes().data())) return nullptr;
  const auto shift = static_cast<int>(sizes.size() - operand.dim());
  std::vector<spec::Cut> cuts = layout.cuts();
  for (spec::Cut& cut : cuts) {
    const int64_t length = operand.size(cut.dim);
    cut.dim += shift;
    if (length != sizes[cut.dim])
      cut.sizes = spec::balanced_sizes(sizes[cut.dim], static_cast<int64_t>(cut.sizes.size()));
  }
  return spec::intern_layout(layout.mesh(), std::move(cuts));
}

}  // namespace

Reference reference_of(c10::ArrayRef<Tensor> operands, at::IntArrayRef sizes) {
  // An operand of the result's own sizes keeps its memory order, so it is asked first.
  for (const bool full : {true, false}) {
    for (const Tensor& t : operands) {
      if (!is_sharded(t) || (t.sizes() == sizes) != full) continue;
      if (const Layout* layout = layout_in_result(t, sizes)) return {t, layout};
    }
  }
  for (const Tensor& t : operands)
    if (is_sharded(t))
      if (const Layout* layout = lengthened_layout(t, sizes)) return {t, layout};
  return {};
}

c10::SmallVector<int64_t, 5> result_strides(const Tensor& like, at::IntArrayRef sizes) {
  if (like.sizes() == sizes && like.is_non_overlapping_and_dense()) {
    return {like.strides().begin(), like.strides().end()};
  }
  return tensor::dense_strides(sizes, at::MemoryFormat::Contiguous);
}

namespace {

/// Puts the pieces of all operands on the stack; returns the layout of the result.
Reference localize(const c10::OperatorHandle& op, const Arguments& args,
                   const std::vector<int64_t>& sizes, const std::vector<Tensor>& operands) {
  Reference ref = reference_of(operands, sizes);
  for (size_t i = 0; i < args.size(); ++i) {
    if (args[i].isTensor() && args.is_written(i) && is_sharded(args[i].toTensor()) &&
        args[i].toTensor().sizes() == at::IntArrayRef(sizes)) {
      ref = {args[i].toTensor(), &tensor::layout_of(args[i].toTensor())};
    }
  }
  if (!ref.layout) return ref;
  for (size_t i = 0; i < args.size(); ++i) {
    c10::IValue& v = args[i];
    if (!v.isTensor() || !v.toTensor().defined()) continue;
    const Tensor t = v.toTensor();
    SHARDFIELD_CHECK(!op.schema().arguments()[i].is_out() || t.sizes() == at::IntArrayRef(sizes),
                     op.schema().name(), "out= has sizes ", t.sizes(), ", the result has ",
                     at::IntArrayRef(sizes), "; pass an out of the result's sizes");
    v = tensor::piece_for(t, *ref.layout, sizes);
  }
  return ref;
}

}  // namespace

void elementwise_kernel(const c10::OperatorHandle& op, Stack* stack) {
  const comm::CallScope scope(op.schema().name().c_str());
  const Arguments args(op, stack);
  if (args.writes_plain()) return gather_and_call(op, stack);
  const auto operands = shaping_operands(op, args);
  const auto sizes = broadcast_sizes(operands);
  std::vector<Tensor> written;
  for (size_t i = 0; i < args.size(); ++i)
    if (args[i].isTensor() && args.is_written(i)) written.push_back(args[i].toTensor());
  for (const Tensor& t : written) tensor::check_writable(t, op.schema().name().c_str());
  const Reference ref = localize(op, args, sizes, operands);
  if (!ref.layout) return gather_and_call(op, stack);
  {
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    if (is_reproducible()) {
      call_in_blocks(op, stack);
    } else {
      op.callBoxed(stack);
    }
  }
  const auto strides = result_strides(ref.tensor, sizes);
  size_t next_written = 0;
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    c10::IValue& v = (*stack)[i];
    if (!v.isTensor()) continue;
    if (next_written < written.size()) {
      v = written[next_written++];
    } else {
      v = tensor::make_sharded_strided(v.toTensor(), ref.layout, sizes, strides);
    }
  }
}

namespace {

struct Written {
  Tensor target;  // the sharded argument
  Tensor full;    // its gathered copy that the plain op wrote
};

/// Cuts of `layout` that a result of these sizes can keep.
const Layout* resharded_layout(const Layout& layout, at::IntArrayRef sizes,
                               at::IntArrayRef result) {
  if (sizes.size() != result.size()) return nullptr;
  for (const spec::Cut& cut : layout.cuts())
    if (sizes[cut.dim] != result[cut.dim]) return nullptr;
  return &layout;
}

Tensor gathered(const Tensor& t, Tensor& example) {
  if (!is_sharded(t)) return t;
  if (!example.defined()) example = t;
  return tensor::gather(t);
}

/// Replaces every sharded argument by its gathered value.
std::vector<Written> gather_arguments(const c10::OperatorHandle& op, const Arguments& args,
                                      Tensor& example) {
  std::vector<Written> written;
  for (size_t i = 0; i < args.size(); ++i) {
    c10::IValue& v = args[i];
    if (v.isTensor() && is_sharded(v.toTensor())) {
      const Tensor t = v.toTensor();
      Tensor full = gathered(t, example);
      if (args.is_written(i)) {
        full = full.clone();
        written.push_back({t, full});
      }
      v = full;
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      bool any = false;
      for (Tensor& t : list) {
        any |= is_sharded(t);
        t = gathered(t, example);
      }
      SHARDFIELD_CHECK(
          !any || !args.is_written(i), op.schema().name(),
          "writes into a list that holds sharded tensors, and has no sharded kernel; pass "
          "foreach=False and fused=False, or call it on x.to_local() of each");
      if (any) v = list;
    } else if (v.isList()) {
      auto list = v.toList().copy();
      bool any = false;
      for (size_t k = 0; k < list.size(); ++k) {
        const c10::IValue& e = list.get(k);
        if (!e.isTensor() || !is_sharded(e.toTensor())) continue;
        list.set(k, gathered(e.toTensor(), example));
        any = true;
      }
      if (any) v = list;
    }
  }
  return written;
}

Tensor reshard_result(const Tensor& result, const Tensor& example, std::vector<Written>& written) {
  for (Written& w : written) {
    if (!result.is_same(w.full)) continue;
    return w.target;
  }
  const Layout& layout = tensor::layout_of(example);
  if (result.dim() == 0) return result;
  return tensor::scatter_like(result, resharded_layout(layout, example.sizes(), result.sizes()));
}

void refuse_views(const c10::OperatorHandle& op) {
  const auto& returns = op.schema().returns();
  const bool view =
      !returns.empty() && returns[0].alias_info() && !returns[0].alias_info()->isWrite();
  SHARDFIELD_CHECK(!view, op.schema().name(),
                   "this view has no sharded form, and a gathered copy would lose writes; use "
                   "x.full_tensor() first if a copy is meant");
}

}  // namespace

void gather_and_call(const c10::OperatorHandle& op, Stack* stack) {
  const std::string& name = op.schema().name();
  const comm::CallScope scope(name.c_str());
  refuse_views(op);
  const Arguments args(op, stack);
  Tensor example;
  args.for_each_tensor([&](size_t, const Tensor& t) {
    if (!is_sharded(t)) return;
    if (!example.defined()) example = t;
    SHARDFIELD_CHECK(&tensor::layout_of(t).mesh() == &tensor::layout_of(example).mesh(), name,
                     "tensors of two meshes in one call: ", tensor::describe(example), " and ",
                     tensor::describe(t), " on rank ", tensor::layout_of(t).mesh().rank,
                     "; bring them to one mesh with full_tensor() and shard_tensor()");
  });
  args.for_each_tensor([&](size_t i, const Tensor& t) {
    if (args.is_written(i)) tensor::check_writable(t, name.c_str());
  });
  if (example.defined()) {
    report_fallback(name, example,
                    args.writes_plain()
                        ? "it is written into an ordinary tensor, which every rank holds whole; "
                          "make that one from a sharded tensor (x.new_zeros, torch.empty_like)"
                        : kNoShardedForm);
  }
  std::vector<Written> written = gather_arguments(op, args, example);
  op.callBoxed(stack);
  if (!example.defined()) return;
  for (Written& w : written) {
    SHARDFIELD_CHECK(w.full.sizes() == w.target.sizes(), name,
                     "would resize a sharded tensor from ", w.target.sizes(), " to ",
                     w.full.sizes(), "; allocate a new one");
    w.target.copy_(tensor::scatter_like(w.full, &tensor::layout_of(w.target)));
  }
  for (size_t i = stack->size() - op.schema().returns().size(); i < stack->size(); ++i) {
    c10::IValue& v = (*stack)[i];
    if (v.isTensor() && v.toTensor().defined()) {
      v = reshard_result(v.toTensor(), example, written);
    } else if (v.isTensorList()) {
      auto list = v.toTensorVector();
      for (Tensor& t : list) t = reshard_result(t, example, written);
      v = list;
    }
  }
}

namespace {

/// The view that a *_copy op copies; nothing for other ops and out= forms.
std::optional<c10::OperatorHandle> view_of_copy(const c10::OperatorHandle& op) {
  const std::string suffix = "_copy";
  c10::OperatorName name = op.operator_name();
  if (name.name.size() <= suffix.size() || !name.name.ends_with(suffix) ||
      name.overload_name.ends_with("out"))
    return std::nullopt;
  name.name.resize(name.name.size() - suffix.size());
  auto view = c10::Dispatcher::singleton().findSchema(name);
  if (!view || view->schema().arguments().size() != op.schema().arguments().size())
    return std::nullopt;
  const auto& returns = view->schema().returns();
  if (returns.empty() || !returns[0].alias_info() || returns[0].alias_info()->isWrite())
    return std::nullopt;
  return view;
}

}  // namespace

bool is_view_copy(const c10::OperatorHandle& op) {
  return view_of_copy(op).has_value();
}

void copy_of_view(const c10::OperatorHandle& op, Stack* stack) {
  view_of_copy(op)->callBoxed(stack);
  c10::IValue& v = stack->back();
  if (v.isTensor()) {
    v = v.toTensor().clone();
  } else {
    auto list = v.toTensorVector();
    for (Tensor& t : list) t = t.clone();
    v = list;
  }
}

void unknown_op(const c10::OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  if (op.hasKernelForDispatchKey(DispatchKey::PrivateUse3)) {
    op.redispatchBoxed(keys - DispatchKeySet(DispatchKey::AutogradFunctionality), stack);
    return;
  }
  gather_and_call(op, stack);
}

}  // namespace shardfield::dispatch
