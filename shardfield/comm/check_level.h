#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/comm/group_mesh.h"

namespace shardfield::comm {

/// How much the ranks compare before data moves.
///   kOff    nothing; calls that do not fit end at the group's timeout
///   kCheap  collectives of per-rank tensors are compared (default)
///   kFull   every transfer of the library is compared: op, kind, dtype, sizes, peers, bytes
enum class CheckLevel : uint8_t { kOff, kCheap, kFull };

/// Sets the level for the whole process; alike on all ranks. Local.
void set_check_level(CheckLevel level);
CheckLevel check_level();

/// A transfer as one rank sees it.
struct Transfer {
  std::string text;                      ///< what every rank of the group must pass alike, in words
  std::vector<int64_t> bytes_to = {};    ///< per rank of the group; empty for collectives
  std::vector<int64_t> bytes_from = {};  ///< per rank of the group; empty for collectives
};

/// At kFull compares a transfer over its group; nothing at other levels. Collective over the group.
/// @throws c10::Error  on every rank of the group alike, with a line for each.
void compare_transfer(const Transfer& mine, const Comm& group, const char* op, c10::Device device);

}  // namespace shardfield::comm
