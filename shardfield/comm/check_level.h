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
///   kFull   every transfer of the library is compared too: op, kind, dtype, sizes; bytes per peer;
///           and the values of plain tensors that meet sharded ones
enum class CheckLevel : uint8_t { kOff, kCheap, kFull };

/// Sets the level for the whole process; alike on all ranks. Local.
void set_check_level(CheckLevel level);
CheckLevel check_level();

inline constexpr const char* kSameCalls = "every rank must make the same calls in the same order";

/// At kFull compares what the ranks of a group are about to do, in words that must be equal;
/// nothing at other levels. Collective over the group.
/// @param advice  what to do when they are not
/// @throws c10::Error  on every rank of the group alike, with a line for each.
void compare_collective(const std::string& mine, const Comm& group, const char* op,
                        c10::Device device, const char* advice = kSameCalls);

/// What a rank is about to move to and from one other rank.
struct Traffic {
  int64_t bytes_to = 0;
  int64_t bytes_from = 0;
};

/// At kFull compares messages with every rank that they go to or come from; nothing at other
/// levels. Collective over the ranks that name each other.
/// @param mine     in words, equal on both sides
/// @param traffic  per rank of the group
/// @throws c10::Error  on both sides.
void compare_messages(const std::string& mine, const std::vector<Traffic>& traffic,
                      const Comm& group, const char* op, c10::Device device);

}  // namespace shardfield::comm
