#include "shardfield/dispatch/elementwise_blocks.h"

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

namespace shardfield::dispatch {

namespace {

using at::Tensor;
using torch::jit::Stack;

/// Longest vector times PyTorch's unrolling, and the length below which it uses one thread.
constexpr int64_t kUnit = 64;
constexpr int64_t kBlock = 32768;

/// The operand broadcast to `sizes` in one row of full units. Numbers stay numbers, since they take
/// another part in type promotion.
Tensor as_row(const Tensor& t, at::IntArrayRef sizes) {
  if (t.dim() == 0) return t;
  const Tensor row = t.expand(sizes).reshape({-1});
  const int64_t fill = (kUnit - row.numel() % kUnit) % kUnit;
  return at::constant_pad_nd(row, {0, fill}, 1);
}

Tensor from_row(const Tensor& row, at::IntArrayRef sizes, const Tensor& like) {
  Tensor result = row.narrow(0, 0, c10::multiply_integers(sizes)).view(sizes);
  if (like.sizes() != sizes || like.is_contiguous() || !like.is_non_overlapping_and_dense())
    return result;
  return at::empty_strided(sizes, like.strides(), result.options()).copy_(result);
}

/// One call per block; the results' blocks put together again.
std::vector<Tensor> run_blocks(const c10::OperatorHandle& op, const std::vector<c10::IValue>& args,
                               int64_t length) {
  std::vector<std::vector<Tensor>> parts;
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    const int64_t count = std::min(kBlock, length - begin);
    Stack stack;
    for (const c10::IValue& v : args) {
      const bool whole = !v.isTensor() || !v.toTensor().defined() || v.toTensor().dim() == 0;
      stack.emplace_back(whole ? v : c10::IValue(v.toTensor().narrow(0, begin, count)));
    }
    op.callBoxed(&stack);
    parts.resize(stack.size());
    for (size_t i = 0; i < stack.size(); ++i) parts[i].push_back(stack[i].toTensor());
  }
  std::vector<Tensor> rows;
  for (const auto& part : parts) rows.push_back(part.size() == 1 ? part[0] : at::cat(part));
  return rows;
}

}  // namespace

void call_in_blocks(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  std::vector<c10::IValue> args = torch::jit::last(*stack, schema.arguments().size()).vec();
  std::vector<int64_t> sizes;
  Tensor like;
  std::vector<Tensor> written;
  for (size_t i = 0; i < args.size(); ++i) {
    if (!args[i].isTensor() || !args[i].toTensor().defined()) continue;
    const Tensor& t = args[i].toTensor();
    sizes = at::infer_size(sizes, t.sizes());
    const auto* alias = schema.arguments()[i].alias_info();
    if (alias && alias->isWrite()) written.push_back(t);
    if (!like.defined() || t.dim() > like.dim()) like = t;
  }
  if (sizes.empty() || c10::multiply_integers(sizes) == 0) return op.callBoxed(stack);
  int64_t length = 0;
  for (c10::IValue& v : args) {
    if (!v.isTensor() || !v.toTensor().defined()) continue;
    v = as_row(v.toTensor(), sizes);
    if (v.toTensor().dim() > 0) length = v.toTensor().numel();
  }
  const auto rows = run_blocks(op, args, length);
  torch::jit::drop(*stack, args.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    if (i < written.size()) {
      written[i].copy_(from_row(rows[i], sizes, written[i]));
      stack->emplace_back(written[i]);
    } else {
      stack->emplace_back(from_row(rows[i], sizes, like));
    }
  }
}

}  // namespace shardfield::dispatch
