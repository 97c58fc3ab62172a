#include "shardfield/comm/check_level.h"

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

constexpr int64_t kTextBytes = 248;

std::atomic<CheckLevel> level{CheckLevel::kCheap};

/// One rank's entry: its text, cut off or padded with zeros, then the bytes to and from each rank.
at::Tensor record_of(const Transfer& mine, int64_t num_ranks) {
  at::Tensor record = at::zeros({kTextBytes + 16 * num_ranks}, at::kByte);
  auto* at = record.data_ptr<uint8_t>();
  std::memcpy(at, mine.text.data(), std::min<size_t>(mine.text.size(), kTextBytes - 1));
  const auto bytes = static_cast<size_t>(8 * num_ranks);
  if (!mine.bytes_to.empty()) std::memcpy(at + kTextBytes, mine.bytes_to.data(), bytes);
  if (!mine.bytes_from.empty()) std::memcpy(at + kTextBytes + bytes, mine.bytes_from.data(), bytes);
  return record;
}

std::string text_of(const at::Tensor& record) {
  return reinterpret_cast<const char*>(record.const_data_ptr<uint8_t>());
}

/// Bytes that rank `of` sends to (or awaits from) rank `peer`.
int64_t bytes_of(const at::Tensor& records, int64_t of, int64_t peer, bool awaited) {
  const at::Tensor record = records[of];
  int64_t value = 0;
  const int64_t place = kTextBytes + 8 * (peer + (awaited ? records.size(0) : 0));
  std::memcpy(&value, record.const_data_ptr<uint8_t>() + place, 8);
  return value;
}

std::string faults_of(const at::Tensor& records) {
  const int64_t n = records.size(0);
  bool alike = true;
  for (int64_t r = 1; r < n; ++r) alike &= text_of(records[r]) == text_of(records[0]);
  std::string faults;
  if (!alike)
    for (int64_t r = 0; r < n; ++r)
      faults += "\n  rank " + std::to_string(r) + ": " + text_of(records[r]);
  for (int64_t from = 0; from < n && alike; ++from)
    for (int64_t to = 0; to < n; ++to) {
      const int64_t sent = bytes_of(records, from, to, false);
      const int64_t awaited = bytes_of(records, to, from, true);
      if (sent != awaited)
        faults += "\n  rank " + std::to_string(from) + " sends " + std::to_string(sent) +
                  " bytes to rank " + std::to_string(to) + ", which awaits " +
                  std::to_string(awaited);
    }
  return faults;
}

}  // namespace

void set_check_level(CheckLevel wanted) {
  level = wanted;
  set_call_checks(wanted != CheckLevel::kOff);
}

CheckLevel check_level() {
  return level.load(std::memory_order_relaxed);
}

void compare_transfer(const Transfer& mine, const Comm& group, const char* op, c10::Device device) {
  if (check_level() != CheckLevel::kFull || group.size() == 1) return;
  at::Tensor record = record_of(mine, group.size()).to(device);
  at::Tensor records = at::empty({group.size() * record.numel()}, record.options());
  wait_for(group.backend(op)->_allgather_base(records, record),
           std::string(op) + " (comparing calls) on rank " + std::to_string(group.rank()) + " of " +
               std::to_string(group.size()));
  const std::string faults = faults_of(records.to(at::kCPU).view({group.size(), -1}));
  SHARDFIELD_CHECK(faults.empty(), op, "the ranks do not agree, on rank ", group.rank(), " of ",
                   group.size(), " of group '", group.name(),
                   "'; every rank must make the same calls in the same order. Got:", faults);
}

}  // namespace shardfield::comm
