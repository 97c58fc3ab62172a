#include "shardfield/comm/check_level.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <map>
#include <mutex>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/call_agreement.h"
#include "shardfield/comm/failure.h"

namespace shardfield::comm {

namespace {

constexpr int64_t kTextBytes = 240;
constexpr int kFirstTag = 1 << 20;  // tags of the data messages are smaller

std::atomic<CheckLevel> level{CheckLevel::kCheap};

/// A rank's words, cut off or padded with zeros, and two numbers.
at::Tensor record_of(const std::string& text, Traffic traffic = {}) {
  at::Tensor record = at::zeros({kTextBytes + 16}, at::kByte);
  auto* bytes = record.data_ptr<uint8_t>();
  std::copy_n(text.data(), std::min<size_t>(text.size(), kTextBytes - 1), bytes);
  std::memcpy(bytes + kTextBytes, &traffic, 16);
  return record;
}

std::string text_of(const at::Tensor& record) {
  return reinterpret_cast<const char*>(record.const_data_ptr<uint8_t>());
}

Traffic traffic_of(const at::Tensor& record) {
  Traffic traffic;
  std::memcpy(&traffic, record.const_data_ptr<uint8_t>() + kTextBytes, 16);
  return traffic;
}

std::string line_of(int rank, const std::string& text) {
  return "\n  rank " + std::to_string(rank) + ": " + text;
}

[[noreturn]] void refuse(const Comm& group, const char* op, const std::string& lines,
                         const char* advice) {
  SHARDFIELD_CHECK(false, op, "the ranks do not agree, on rank ", group.rank(), " of ",
                   group.size(), " of group '", group.name(), "'; ", advice, ". Got:", lines);
}

/// Comparisons between two ranks so far, by group: both sides count alike.
int next_tag(const c10d::Backend* backend, int peer) {
  static auto* mutex = new std::mutex();
  static auto* counts = new std::map<std::pair<const c10d::Backend*, int>, int>();
  const std::lock_guard<std::mutex> lock(*mutex);
  return kFirstTag + ((*counts)[{backend, peer}]++ & 0xfffff);
}

std::string place_of(const Comm& group, const char* op) {
  return std::string(op) + " (comparing calls) on rank " + std::to_string(group.rank()) + " of " +
         std::to_string(group.size()) + in_current_layer();
}

/// Every peer's record; empty for ranks that there is no traffic with.
std::vector<at::Tensor> swap_records(const std::string& mine, const std::vector<Traffic>& traffic,
                                     const Comm& group, const char* op, c10::Device device) {
  auto backend = group.backend(op);
  const bool coalesce = backend->supportsCoalescing() && backend->getBackendName() == "nccl";
  std::vector<at::Tensor> theirs(traffic.size()), sent;
  std::vector<c10::intrusive_ptr<c10d::Work>> work;
  if (coalesce) backend->startCoalescing();
  for (size_t r = 0; r < traffic.size(); ++r) {
    if (traffic[r].bytes_to == 0 && traffic[r].bytes_from == 0) continue;
    const int peer = static_cast<int>(r);
    const int tag = next_tag(backend.get(), peer);
    sent.push_back(record_of(mine, traffic[r]).to(device));
    theirs[r] = at::empty_like(sent.back());
    std::vector<at::Tensor> from{theirs[r]}, to{sent.back()};
    work.push_back(backend->recv(from, peer, tag));
    work.push_back(backend->send(to, peer, tag));
  }
  if (coalesce) work = {backend->endCoalescing()};
  for (const auto& w : work) wait_for(w, place_of(group, op));
  for (at::Tensor& record : theirs)
    if (record.defined()) record = record.cpu();
  return theirs;
}

}  // namespace

void set_check_level(CheckLevel wanted) {
  level = wanted;
  set_call_checks(wanted != CheckLevel::kOff);
}

CheckLevel check_level() {
  return level.load(std::memory_order_relaxed);
}

void compare_collective(const std::string& mine, const Comm& group, const char* op,
                        c10::Device device, const char* advice) {
  if (check_level() != CheckLevel::kFull || group.size() == 1) return;
  at::Tensor record = record_of(mine).to(device);
  at::Tensor records = at::empty({group.size() * record.numel()}, record.options());
  wait_for(group.backend(op)->_allgather_base(records, record), place_of(group, op));
  const at::Tensor table = records.cpu().view({group.size(), -1});
  bool alike = true;
  std::string lines;
  for (int r = 0; r < group.size(); ++r) {
    alike &= text_of(table[r]) == text_of(table[0]);
    lines += line_of(r, text_of(table[r]));
  }
  if (!alike) refuse(group, op, lines, advice);
}

void compare_messages(const std::string& mine, const std::vector<Traffic>& traffic,
                      const Comm& group, const char* op, c10::Device device) {
  if (check_level() != CheckLevel::kFull || group.size() == 1) return;
  const std::vector<at::Tensor> theirs = swap_records(mine, traffic, group, op, device);
  std::string lines;
  for (size_t r = 0; r < theirs.size(); ++r) {
    if (!theirs[r].defined()) continue;
    const Traffic other = traffic_of(theirs[r]);
    const bool fits = text_of(theirs[r]) == text_of(record_of(mine)) &&
                      other.bytes_from == traffic[r].bytes_to &&
                      other.bytes_to == traffic[r].bytes_from;
    if (fits) continue;
    lines += line_of(group.rank(), mine + ", " + std::to_string(traffic[r].bytes_to) +
                                       " bytes to rank " + std::to_string(r) + ", awaits " +
                                       std::to_string(traffic[r].bytes_from));
    lines +=
        line_of(static_cast<int>(r), text_of(theirs[r]) + ", " + std::to_string(other.bytes_to) +
                                         " bytes to rank " + std::to_string(group.rank()) +
                                         ", awaits " + std::to_string(other.bytes_from));
  }
  if (!lines.empty()) refuse(group, op, lines, kSameCalls);
}

}  // namespace shardfield::comm
