#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

#include "shardfield/spec/layout.h"

/// Boxed kernels: the rules for ops without a kernel of their own.
namespace shardfield::dispatch {

/// At AutogradPrivateUse3: prepares arguments, then runs PyTorch's own autograd kernel, which comes
/// back to the PrivateUse3 kernel below it.
void formula(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);
void formula_of_elementwise(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                            torch::jit::Stack* stack);
/// At PrivateUse3: an elementwise op on the pieces.
void elementwise_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// Gathers sharded arguments (differentiably), runs the plain op and cuts results of the same
/// shape again. Written arguments get their part back. Counted in the report; an error in strict
/// mode. Collective over the mesh.
void gather_and_call(const c10::OperatorHandle& op, torch::jit::Stack* stack);

/// At both keys for the copying form of a view, e.g. unsqueeze_copy: the view of the same name,
/// then a copy.
void copy_of_view(const c10::OperatorHandle& op, torch::jit::Stack* stack);
bool is_view_copy(const c10::OperatorHandle& op);

/// At AutogradPrivateUse3 for ops without any autograd kernel (custom ops).
void unknown_op(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack);

/// The operand whose layout an elementwise result takes, given the broadcast sizes: the first
/// sharded one whose cut dims are full size; layout is as seen from the result's dims.
struct Reference {
  at::Tensor tensor;
  const spec::Layout* layout = nullptr;
};
Reference reference_of(c10::ArrayRef<at::Tensor> operands, at::IntArrayRef sizes);

/// Layout of an operand as seen from broadcast `sizes` (dims aligned right); nullptr if a cut dim
/// is broadcast.
const spec::Layout* layout_in_result(const at::Tensor& operand, at::IntArrayRef sizes);

/// Outer strides of an elementwise result, from outer geometry alone: those of `like` where dense,
/// else contiguous.
c10::SmallVector<int64_t, 5> result_strides(const at::Tensor& like, at::IntArrayRef sizes);

/// Strict mode and the once-per-op warning, with what to do in it. Local.
void set_strict(bool strict);
bool is_strict();
inline constexpr const char* kNoShardedForm = "it has no sharded form";
void report_fallback(const std::string& op, const at::Tensor& example,
                     const char* reason = kNoShardedForm);

}  // namespace shardfield::dispatch
