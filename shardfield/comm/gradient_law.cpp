#include "shardfield/comm/gradient_law.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/library.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/group_mesh.h"

namespace shardfield::comm {

namespace {

/// Sums by the address of what they belong to; the weak pointer tells whether it still lives.
template <class T>
class Sums {
 public:
  struct Entry {
    c10::weak_intrusive_ptr<T> owner;
    GradientSum sum;
  };

  void remember(T* owner, const GradientSum& sum) {
    if (entries_.size() >= next_sweep_) {
      std::erase_if(entries_, [](const auto& item) { return item.second.owner.expired(); });
      next_sweep_ = std::max<size_t>(256, 2 * entries_.size());
    }
    const auto held = c10::intrusive_ptr<T>::reclaim_copy(owner);
    entries_.insert_or_assign(owner, Entry{c10::weak_intrusive_ptr<T>(held), sum});
  }
  const std::unordered_map<const T*, Entry>& entries() const { return entries_; }

 private:
  std::unordered_map<const T*, Entry> entries_;
  size_t next_sweep_ = 256;
};

struct Table {
  std::mutex mutex;
  Sums<c10::StorageImpl> memories;
  Sums<c10::TensorImpl> leaves;
};

Table& table() {
  static auto* t = new Table();
  return *t;
}
std::atomic<bool> any_sum{false};

/// Global ranks of a group in its order; the default group of c10d names none and is all ranks.
std::vector<int64_t> ranks_of(c10d::Backend& group) {
  std::vector<int64_t> ranks;
  try {
    const auto& named = group.getBackendOptions()->global_ranks_in_group;
    ranks.assign(named.begin(), named.end());
  } catch (const std::exception&) {  // a backend without options
    return {};
  }
  if (ranks.empty()) {
    ranks.resize(static_cast<size_t>(group.getSize()));
    std::iota(ranks.begin(), ranks.end(), 0);
  }
  return ranks;
}

/// The mesh axes that a group of the mesh runs along; nullopt for a group of other make.
std::optional<std::vector<int>> axes_of(const c10d::Backend& group, const GroupMesh& mesh) {
  std::vector<int> all(static_cast<size_t>(mesh.num_axes()));
  std::iota(all.begin(), all.end(), 0);
  constexpr const char* kOp = "gradient";
  if (mesh.whole.backend(kOp).get() == &group) return all;
  for (const int a : all)
    if (mesh.axis[static_cast<size_t>(a)].backend(kOp).get() == &group) return std::vector<int>{a};
  return std::nullopt;
}

/// How many ranks of this rank's domain the group holds.
int64_t shared_ranks(const GradientSum& sum, c10d::Backend& group) {
  const GroupMesh& mesh = groups_of(*sum.mesh);
  if (const auto axes = axes_of(group, mesh)) {
    int64_t count = 1;
    for (const int a : *axes)
      if (std::ranges::count(sum.axes, a)) count *= mesh.shape[static_cast<size_t>(a)];
    return count;
  }
  const std::vector<int64_t> ranks = ranks_of(group);
  const std::vector<int64_t> domain = domain_ranks(sum);
  return std::ranges::count_if(domain, [&](int64_t r) { return std::ranges::count(ranks, r) > 0; });
}

/// The plain leaves that the running node hands its gradients to, through nothing but operations of
/// one operand: a weight behind a cast, a transposition, a view.
std::vector<at::Tensor> leaves_behind(const torch::autograd::Node& node) {
  constexpr int kMostOperations = 6;
  std::vector<at::Tensor> leaves;
  for (const auto& edge : node.next_edges()) {
    const torch::autograd::Node* next = edge.function.get();
    for (int depth = 0; next && depth < kMostOperations; ++depth) {
      if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(next)) {
        leaves.push_back(leaf->variable);
        break;
      }
      // A node of the library stands between plain values and a rank's own ones, but for the one
      // that brings a gradient together.
      const std::string name = next->name();
      const bool is_own = name.find("shardfield::") != std::string::npos;
      if (next->num_outputs() != 1) break;
      if (is_own && name.find("WholeGradientFn") == std::string::npos) break;
      next = next->next_edge(0).function.get();
    }
  }
  return leaves;
}

std::string list(const std::vector<int64_t>& values) {
  std::string out = "[";
  for (const int64_t v : values) out += (out.size() > 1 ? ", " : "") + std::to_string(v);
  return out + "]";
}

// ------------------------------------------------------------------- c10d's own sums over ranks

bool adds_up(c10d::ReduceOp::RedOpType op) {
  return op == c10d::ReduceOp::SUM || op == c10d::ReduceOp::PREMUL_SUM;
}

void collect_tensors(const c10::IValue& value, std::vector<at::Tensor>& out) {
  if (value.isTensor()) {
    out.push_back(value.toTensor());
  } else if (value.isTensorList()) {
    for (const at::Tensor& t : value.toTensorVector()) out.push_back(t);
  } else if (value.isList()) {
    for (const c10::IValue& item : value.toListRef()) collect_tensors(item, out);
  }
}

struct Call {
  std::vector<at::Tensor> inputs;
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  c10d::ReduceOp::RedOpType reduction = c10d::ReduceOp::UNUSED;
};

/// The group by its name in c10d's registry, or itself.
c10::intrusive_ptr<c10d::ProcessGroup> group_from(const c10::IValue& value) {
  return value.isString() ? c10d::resolve_process_group(value.toStringRef())
                          : value.toCustomClass<c10d::ProcessGroup>();
}

/// What a reducing op of c10d was called with; outputs are left out.
Call call_of(const c10::FunctionSchema& schema, const torch::jit::Stack& stack) {
  Call call;
  const auto& arguments = schema.arguments();
  for (size_t i = 0; i < arguments.size(); ++i) {
    const c10::IValue& value = torch::jit::peek(stack, i, arguments.size());
    const std::string& name = arguments[i].name();
    if (name == "process_group" || name == "group_name") {
      call.group = group_from(value);
    } else if (name == "reduce_op" && value.isString()) {
      if (value.toStringRef() == "sum") call.reduction = c10d::ReduceOp::SUM;
    } else if (name == "reduce_op") {
      call.reduction = value.toCustomClass<c10d::ReduceOp>()->op_;
    } else if (!name.starts_with("output") && name != "sparse_indices") {
      collect_tensors(value, call.inputs);
    }
  }
  return call;
}

void reduce_once(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                 torch::jit::Stack* stack) {
  if (any_sum.load(std::memory_order_relaxed)) {
    const Call call = call_of(op.schema(), *stack);
    if (call.group && adds_up(call.reduction)) {
      const std::string name = op.schema().name();  // "c10d::allreduce_"
      for (const at::Tensor& t : call.inputs)
        if (t.defined() && gradient_sum_of(t))
          check_summed_once(t, *call.group->getBackend(t.device().type()), name.c_str());
    }
  }
  op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
}

// The key is free for these ops on every device, and below autograd. The functional all-reduces
// copy before they call c10d's.
TORCH_LIBRARY_IMPL(c10d, ADInplaceOrView, library) {
  for (const char* name : {"allreduce_", "allreduce_coalesced_", "reduce_", "reduce_scatter_",
                           "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&reduce_once>());
}
TORCH_LIBRARY_IMPL(_c10d_functional, ADInplaceOrView, library) {
  for (const char* name : {"all_reduce", "all_reduce_coalesced"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&reduce_once>());
}

}  // namespace

void remember_gradient_sum(const at::Tensor& value, const spec::Mesh& mesh,
                           const std::vector<int>& axes) {
  const auto node = torch::autograd::get_current_node();
  if (!node || !value.has_storage()) return;
  GradientSum sum{&mesh, {}};
  for (const int a : axes)
    if (mesh.shape[static_cast<size_t>(a)] > 1) sum.axes.push_back(a);
  if (sum.axes.empty()) return;
  const std::vector<at::Tensor> leaves = leaves_behind(*node);
  Table& known = table();
  const std::lock_guard<std::mutex> lock(known.mutex);
  known.memories.remember(value.storage().unsafeGetStorageImpl(), sum);
  for (const at::Tensor& leaf : leaves)
    if (leaf.has_storage()) known.leaves.remember(leaf.unsafeGetTensorImpl(), sum);
  any_sum = true;
}

std::optional<GradientSum> gradient_sum_of(const at::Tensor& t) {
  if (!any_sum.load(std::memory_order_relaxed) || !t.has_storage()) return std::nullopt;
  const auto* memory = t.storage().unsafeGetStorageImpl();
  std::vector<Sums<c10::TensorImpl>::Entry> leaves;
  {
    Table& known = table();
    const std::lock_guard<std::mutex> lock(known.mutex);
    const auto found = known.memories.entries().find(memory);
    if (found != known.memories.entries().end() && !found->second.owner.expired())
      return found->second.sum;
    for (const auto& [address, entry] : known.leaves.entries()) leaves.push_back(entry);
  }
  // Taking hold of a leaf may wait for Python's lock: not while holding the table.
  for (const auto& entry : leaves) {
    const auto leaf = entry.owner.lock();
    if (!leaf) continue;
    const at::Tensor owner(leaf);
    const at::Tensor& grad = owner.grad();
    if (grad.defined() && grad.has_storage() && grad.storage().unsafeGetStorageImpl() == memory)
      return entry.sum;
  }
  return std::nullopt;
}

bool is_equal_over_domain(const at::Tensor& t, const GradientSum& sum) {
  const at::NoGradGuard no_grad;
  const at::Tensor flat = (t.is_complex() ? at::view_as_real(t) : t).reshape(-1).to(at::kDouble);
  const at::Tensor marks = at::stack({flat.sum(), flat.abs().sum()});
  const at::Tensor most =
      all_reduce(at::cat({marks, -marks}), *sum.mesh, sum.axes, Reduction::kMax).cpu();
  const auto* m = most.const_data_ptr<double>();
  return m[0] == -m[2] && m[1] == -m[3] && m[1] != 0;
}

std::vector<int64_t> domain_ranks(const GradientSum& sum) {
  const GroupMesh& mesh = groups_of(*sum.mesh);
  const std::vector<int64_t> ranks = ranks_of(*mesh.whole.backend("gradient"));
  std::vector<int64_t> domain;
  for (int r = 0; r < mesh.size() && r < static_cast<int>(ranks.size()); ++r) {
    const std::vector<int64_t> at = mesh.coord_of(r);
    bool apart = false;
    for (int a = 0; a < mesh.num_axes(); ++a)
      apart |= at[static_cast<size_t>(a)] != mesh.coord[static_cast<size_t>(a)] &&
               !std::ranges::count(sum.axes, a);
    if (!apart) domain.push_back(ranks[static_cast<size_t>(r)]);
  }
  return domain;
}

void check_summed_once(const at::Tensor& t, c10d::Backend& group, const char* op) {
  const auto sum = gradient_sum_of(t);
  if (!sum) return;
  const int64_t shared = shared_ranks(*sum, group);
  // Ranks of the domain that are not in the group cannot take part in a comparison.
  const auto whole = static_cast<int64_t>(domain_ranks(*sum).size());
  if (shared < 2 || (shared == whole && !is_equal_over_domain(t, *sum))) return;
  SHARDFIELD_CHECK(
      false, op, "expected a gradient that is still to be summed, got one of ",
      list(t.sizes().vec()), " that backward summed over the ranks ", list(domain_ranks(*sum)),
      " of its domain already; summed over the group ", list(ranks_of(group)), " it would be ",
      shared, " times too large, on rank ", sum->mesh->rank, " of ", sum->mesh->size(),
      "; leave it out, or reduce over the data axis alone (group=mesh['data'].get_group())");
}

}  // namespace shardfield::comm
