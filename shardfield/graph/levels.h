#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/graph/adjacency.h"

namespace shardfield::graph {

/// Parts for graphs without coordinates: recursive halving of breadth-first orders that start at a
/// node far from the middle (level structures, as in reverse Cuthill-McKee). Sizes are even as in
/// cut_order. Local, deterministic.
[[nodiscard]] std::vector<int32_t> halve_by_levels(const Lists& graph,
                                                   std::span<const double> weights,
                                                   int64_t num_parts);

}  // namespace shardfield::graph
