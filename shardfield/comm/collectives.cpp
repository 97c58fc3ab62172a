#include "shardfield/comm/collectives.h"

#include <array>
#include <ranges>
#include <sstream>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/carried_dtype.h"
#include "shardfield/comm/check_level.h"
#include "shardfield/comm/failure.h"
#include "shardfield/comm/gradient_law.h"
#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

namespace {

const char* op_name(const char* otherwise) {
  return current_op() ? current_op() : otherwise;
}

std::string describe(const char* op, const spec::Mesh& mesh) {
  return std::string(op) + " on rank " + std::to_string(mesh.rank) + " of " +
         std::to_string(mesh.size()) + in_current_layer();
}

/// What all ranks of a group must pass alike, in words; at check level full alone.
std::string words_of(const char* kind, const at::Tensor& buffer) {
  if (check_level() != CheckLevel::kFull) return {};
  std::ostringstream out;
  out << kind << " in " << op_name("a direct call") << in_current_layer() << ": "
      << buffer.scalar_type() << " " << buffer.sizes();
  return out.str();
}

/// Derivative formulas may hand over zeros that have no memory.
at::Tensor with_memory(const at::Tensor& value) {
  return value._is_zerotensor() ? at::zeros(value.sizes(), value.options()) : value;
}

/// Contiguous, conj and neg bits resolved, complex as real pairs.
at::Tensor plain_memory(const at::Tensor& value) {
  at::Tensor out = with_memory(value).resolve_conj().resolve_neg().contiguous();
  return out.is_complex() ? at::view_as_real(out) : out;
}

c10d::ReduceOp::RedOpType op_type(Reduction reduction) {
  switch (reduction) {
    case Reduction::kSum:
      return c10d::ReduceOp::SUM;
    case Reduction::kProduct:
      return c10d::ReduceOp::PRODUCT;
    case Reduction::kMin:
      return c10d::ReduceOp::MIN;
    default:
      return c10d::ReduceOp::MAX;
  }
}

void all_reduce_group(at::Tensor& buffer, const spec::Mesh& mesh, const Comm& comm,
                      Reduction reduction) {
  if (comm.size() == 1) return;
  const char* op = op_name("all_reduce");
  constexpr std::array kKinds{"sum over ranks", "product over ranks", "minimum over ranks",
                              "maximum over ranks"};
  compare_collective(words_of(kKinds[static_cast<size_t>(reduction)], buffer), comm, op,
                     buffer.device());
  c10d::AllreduceOptions options;
  options.reduceOp = op_type(reduction);
  std::vector<at::Tensor> buffers{buffer};
  // A ring sends every byte twice, less the own share.
  count_message(mesh.context, 2 * buffer.nbytes() * (comm.size() - 1) / comm.size());
  wait_for(comm.backend(op)->allreduce(buffers, options), describe(op, mesh));
}

void all_reduce_buffer(at::Tensor& buffer, const spec::Mesh& mesh, const std::vector<int>& axes,
                       Reduction reduction) {
  const GroupMesh& groups = groups_of(mesh);
  int64_t covered = 1;
  for (int a : axes) covered *= mesh.shape[a];
  if (covered == mesh.size()) return all_reduce_group(buffer, mesh, groups.whole, reduction);
  for (int a : axes) all_reduce_group(buffer, mesh, groups.axis[a], reduction);
}

/// Flags in bytes: a sum over 256 ranks would be 0.
Reduction reduction_of_flags(Reduction reduction) {
  if (reduction == Reduction::kSum) return Reduction::kMax;
  return reduction == Reduction::kProduct ? Reduction::kMin : reduction;
}

}  // namespace

at::Tensor all_reduce(const at::Tensor& value, const spec::Mesh& mesh, const std::vector<int>& axes,
                      Reduction reduction) {
  const at::NoGradGuard no_grad;
  SHARDFIELD_CHECK(!value.is_complex() || reduction == Reduction::kSum, op_name("all_reduce"),
                   "complex values can only be summed over ranks");
  const auto dtype = value.scalar_type();
  const auto carried = carried_dtype(dtype);
  at::Tensor buffer;
  if (carried != dtype) {
    buffer = with_memory(value.detach()).to(carried).contiguous();
  } else {
    buffer = with_memory(value.detach())
                 .clone(at::MemoryFormat::Contiguous)
                 .resolve_conj()
                 .resolve_neg();
  }
  at::Tensor raw = buffer.is_complex() ? at::view_as_real(buffer) : buffer;
  if (dtype == at::kBool) reduction = reduction_of_flags(reduction);
  const bool ordered = reduction == Reduction::kMin || reduction == Reduction::kMax;
  SHARDFIELD_CHECK(!ordered || dtype != at::kUInt64, op_name("all_reduce"),
                   "64-bit numbers without a sign can only be summed over ranks; convert them");
  if (ordered && at::isFloatingType(dtype)) {
    // Transports keep or lose a NaN depending on which rank holds it: carry it as a flag.
    at::Tensor nan = at::isnan(raw).to(raw.scalar_type());
    if (reduction == Reduction::kMin) nan = -nan;
    at::Tensor packed = at::stack({at::nan_to_num(raw, 0.0, std::numeric_limits<double>::infinity(),
                                                  -std::numeric_limits<double>::infinity()),
                                   nan});
    all_reduce_buffer(packed, mesh, axes, reduction);
    return packed[0]
        .masked_fill(packed[1] != 0, std::numeric_limits<double>::quiet_NaN())
        .to(dtype);
  }
  all_reduce_buffer(raw, mesh, axes, reduction);
  if (reduction == Reduction::kSum) remember_gradient_sum(buffer, mesh, axes);
  return dtype == at::kBool ? (buffer != 0) : buffer.to(dtype);
}

at::Tensor all_gather(const at::Tensor& value, const spec::Mesh& mesh,
                      const std::vector<int>& axes) {
  const at::NoGradGuard no_grad;
  const GroupMesh& groups = groups_of(mesh);
  const at::Tensor own = plain_memory(value.detach());
  const bool as_bytes = carried_dtype(own.scalar_type()) != own.scalar_type();
  at::Tensor all = (as_bytes ? own.reshape(-1).view(at::kByte) : own).unsqueeze(0);
  // The last axis first, so that the first one ends up slowest.
  for (const int axis : std::views::reverse(axes)) {
    const Comm& comm = groups.axis[axis];
    if (comm.size() == 1) continue;
    const char* op = op_name("all_gather");
    std::vector<int64_t> sizes = all.sizes().vec();
    sizes[0] *= comm.size();
    at::Tensor out = at::empty(sizes, all.options());
    compare_collective(words_of("gather from ranks", all), comm, op, all.device());
    count_message(mesh.context, static_cast<int64_t>(all.nbytes()) * (comm.size() - 1));
    wait_for(comm.backend(op)->_allgather_base(out, all), describe(op, mesh));
    all = out;
  }
  if (as_bytes) {
    std::vector<int64_t> sizes = own.sizes().vec();
    sizes.insert(sizes.begin(), all.size(0));
    return all.view(own.scalar_type()).reshape(sizes);
  }
  return value.is_complex() ? at::view_as_complex(all) : all;
}

Exchange::Exchange(std::vector<c10::intrusive_ptr<c10d::Work>> work, std::vector<at::Tensor> keep,
                   std::string context)
    : work_(std::move(work)), keep_(std::move(keep)), context_(std::move(context)) {}

Exchange::~Exchange() {
  // Reached with work left only while another error unwinds; buffers must outlive the transfers.
  for (auto& work : work_) {
    try {
      work->wait();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the first error is already on its way
    }
  }
}

void Exchange::wait() {
  while (!work_.empty()) {
    auto work = std::move(work_.back());
    work_.pop_back();
    wait_for(work, context_);
  }
  keep_.clear();
}

namespace {

/// Transfers that were started; nothing is freed while one of them is under way.
struct Started {
  std::vector<c10::intrusive_ptr<c10d::Work>> work;
  std::vector<at::Tensor> keep;
};

void post_messages(const Comm& comm, c10d::Backend& backend, int context,
                   const std::vector<Message>& sends, const std::vector<Message>& recvs,
                   Started& started) {
  const bool coalesce = backend.supportsCoalescing() && backend.getBackendName() == "nccl";
  if (coalesce) backend.startCoalescing();
  for (const Message& m : recvs) {
    started.keep.push_back(m.data.is_complex() ? at::view_as_real(m.data) : m.data);
    std::vector<at::Tensor> one{started.keep.back()};
    auto w = backend.recv(one, m.peer, comm.next_recv_tag(m.peer));
    if (!coalesce) started.work.push_back(std::move(w));
  }
  for (const Message& m : sends) {
    started.keep.push_back(plain_memory(m.data));
    count_message(context, static_cast<int64_t>(started.keep.back().nbytes()));
    std::vector<at::Tensor> one{started.keep.back()};
    auto w = backend.send(one, m.peer, comm.next_send_tag(m.peer));
    if (!coalesce) started.work.push_back(std::move(w));
  }
  if (coalesce) started.work.push_back(backend.endCoalescing());
}

void compare(const Comm& comm, const char* op, const std::vector<Message>& sends,
             const std::vector<Message>& recvs) {
  if (check_level() != CheckLevel::kFull) return;
  std::vector<Traffic> traffic(static_cast<size_t>(comm.size()));
  for (const Message& m : sends)
    traffic[static_cast<size_t>(m.peer)].bytes_to += static_cast<int64_t>(m.data.nbytes());
  for (const Message& m : recvs)
    traffic[static_cast<size_t>(m.peer)].bytes_from += static_cast<int64_t>(m.data.nbytes());
  const at::Tensor& any = sends.empty() ? recvs.front().data : sends.front().data;
  std::ostringstream words;
  words << "messages in " << op << in_current_layer() << ": " << any.scalar_type();
  compare_messages(words.str(), traffic, comm, op, any.device());
}

}  // namespace

Exchange start_exchange(const spec::Mesh& mesh, std::vector<Message> sends,
                        std::vector<Message> recvs) {
  const at::NoGradGuard no_grad;
  const Comm& comm = groups_of(mesh).whole;
  const char* op = op_name("exchange");
  std::erase_if(sends, [](const Message& m) { return m.data.numel() == 0; });
  std::erase_if(recvs, [](const Message& m) { return m.data.numel() == 0; });
  if (sends.empty() && recvs.empty()) return {};
  compare(comm, op, sends, recvs);
  for (const Message& m : recvs)
    SHARDFIELD_CHECK(m.data.is_contiguous(), op, "receive buffers must be contiguous");
  auto backend = comm.backend(op);
  Started started;
  try {
    post_messages(comm, *backend, mesh.context, sends, recvs, started);
  } catch (const std::exception& error) {  // the connection is known to be closed
    {
      const Exchange ends(std::move(started.work), std::move(started.keep), "");
    }
    throw_failed(describe(op, mesh), error.what());
  }
  return {std::move(started.work), std::move(started.keep), describe(op, mesh)};
}

void broadcast_(at::Tensor& value, const spec::Mesh& mesh, int source) {
  const Comm& comm = groups_of(mesh).whole;
  if (comm.size() == 1) return;
  const char* op = op_name("broadcast");
  SHARDFIELD_CHECK(value.is_contiguous(), op, "expected a contiguous tensor");
  c10d::BroadcastOptions options;
  options.rootRank = source;
  std::vector<at::Tensor> one{value.is_complex() ? at::view_as_real(value) : value};
  compare_collective(words_of("broadcast", value) + " from rank " + std::to_string(source), comm,
                     op, value.device());
  if (comm.rank() == source) count_message(mesh.context, static_cast<int64_t>(value.nbytes()));
  wait_for(comm.backend(op)->broadcast(one, options), describe(op, mesh));
}

std::vector<std::vector<int64_t>> all_gather_ints(const std::vector<int64_t>& mine,
                                                  const spec::Mesh& mesh, c10::Device device) {
  const at::NoGradGuard no_grad;
  const int n = mesh.size();
  const auto len = static_cast<int64_t>(mine.size());
  at::Tensor table = at::zeros({n, len}, at::kLong);
  table[mesh.rank].copy_(at::tensor(mine, at::kLong));
  if (n > 1) {
    at::Tensor buffer = table.to(device);
    all_reduce_group(buffer, mesh, groups_of(mesh).whole, Reduction::kSum);
    table = buffer.to(at::kCPU);
  }
  std::vector<std::vector<int64_t>> out(n);
  const int64_t* p = table.const_data_ptr<int64_t>();
  for (int r = 0; r < n; ++r) out[r].assign(p + r * len, p + (r + 1) * len);
  return out;
}

}  // namespace shardfield::comm
