// Level full of the checks: each op that brings plain and sharded tensors together compares the
// plain ones across the ranks first, by a hash of their values. Tensors made at that level carry
// kOperandCheckKey, which leads here before everything else.

#include <cstring>
#include <sstream>

#include <ATen/ATen.h>
#include <torch/library.h>

#include "shardfield/comm/check_level.h"
#include "shardfield/dispatch/arguments.h"
#include "shardfield/tensor/operand_check_key.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::dispatch {

namespace {

using at::Tensor;
using c10::DispatchKey;
using c10::DispatchKeySet;

uint64_t mixed(uint64_t hash, uint64_t word) {
  hash = (hash ^ word) * 0x9e3779b97f4a7c15U;
  return hash ^ (hash >> 32);
}

uint64_t hash_of(const Tensor& value) {
  const Tensor memory = value.detach().resolve_conj().resolve_neg().cpu().contiguous();
  const size_t size = memory.nbytes();
  const auto* bytes = static_cast<const char*>(size ? memory.const_data_ptr() : nullptr);
  uint64_t hash = size;
  for (size_t i = 0; i < size; i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, bytes + i, std::min(size - i, sizeof word));
    hash = mixed(hash, word);
  }
  return hash;
}

/// A tensor whose values are in memory: no wrapper of another library, no zeros without memory.
bool has_values(const Tensor& t) {
  constexpr DispatchKeySet wrapped({DispatchKey::Python, DispatchKey::FuncTorchBatched,
                                    DispatchKey::FuncTorchGradWrapper, DispatchKey::Functionalize,
                                    DispatchKey::ZeroTensor});
  return t.layout() == at::kStrided && !t.is_meta() && !t.is_quantized() &&
         !t.key_set().has_any(wrapped);
}

/// The plain operands that an op reads, in words that must be equal on all ranks; empty when there
/// are none. Their common hash stands in front: a long text is cut off.
std::string words_of(const c10::OperatorHandle& op, const Arguments& args) {
  std::ostringstream names;
  uint64_t all = 0;
  bool any = false;
  args.for_each_tensor([&](size_t i, const Tensor& t) {
    if (tensor::is_sharded(t) || args.is_written(i) || !has_values(t)) return;
    const uint64_t hash = hash_of(t);
    all = mixed(all, hash);
    names << (any ? ", " : ": ") << op.schema().arguments()[i].name() << " " << t.scalar_type()
          << " " << t.sizes() << " hash " << std::hex << (hash >> 32) << std::dec;
    any = true;
  });
  std::ostringstream out;
  if (any) out << "plain operands of " << op.schema().name() << " (" << std::hex << all << ")";
  return any ? out.str() + names.str() : "";
}

/// The first sharded operand.
Tensor sharded_among(const Arguments& args) {
  Tensor sharded;
  args.for_each_tensor([&](size_t, const Tensor& t) {
    if (!sharded.defined() && tensor::is_sharded(t)) sharded = t;
  });
  return sharded;
}

void compare_plain_operands(const c10::OperatorHandle& op, const Arguments& args) {
  const at::NoGradGuard no_grad;
  const Tensor sharded = sharded_among(args);
  if (!sharded.defined() || tensor::layout_of(sharded).mesh().size() == 1) return;
  const std::string words = words_of(op, args);
  if (words.empty()) return;
  comm::compare_collective(
      words, comm::groups_of(tensor::layout_of(sharded).mesh()).whole, op.schema().name().c_str(),
      sharded.device(),
      "a plain tensor stands for the same value on every rank: give weights to "
      "sync_module_over_mesh, pieces to ShardTensor.from_local, set equal seeds");
}

void check_and_go_on(const c10::OperatorHandle& op, DispatchKeySet keys, torch::jit::Stack* stack) {
  // The op's own parts are not compared again.
  const c10::impl::ExcludeDispatchKeyGuard once(tensor::kOperandCheckKey);
  if (comm::check_level() == comm::CheckLevel::kFull)
    compare_plain_operands(op, Arguments(op, stack));
  op.redispatchBoxed(keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, tensor::kOperandCheckKey),
                     stack);
}

TORCH_LIBRARY_IMPL(_, DeferredInit, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&check_and_go_on>());
}

}  // namespace

}  // namespace shardfield::dispatch
