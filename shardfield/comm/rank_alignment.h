#pragma once

#include <string>
#include <vector>

#include "shardfield/comm/distributed_manager.h"
#include "shardfield/comm/rank_card.h"

namespace shardfield::comm {

/// Compares the solver's ranks with a group's before any of the program's data moves: sizes, ranks,
/// order, devices, and a token passed around the group both ways. Collective over the group.
/// @return the cards by solver rank
/// @throws c10::Error on every rank alike, with the table.
std::vector<RankCard> align_communicators(int solver_rank, int solver_size,
                                          const DistributedManager& manager,
                                          const std::string& group = "world");

}  // namespace shardfield::comm
