#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/graph/adjacency.h"

namespace shardfield::graph {

/// Weight of one cell where `weights` may be empty: then each weighs 1.
[[nodiscard]] inline double weight_of(std::span<const double> weights, int64_t cell) {
  return weights.empty() ? 1.0 : weights[static_cast<size_t>(cell)];
}

/// What every part may weigh.
struct Balance {
  double least = 0;
  double most = 0;
};

/// Bounds for the parts. With tolerance 0 and no weights sizes may differ by one cell; otherwise no
/// part may weigh more than (1 + tolerance) times the mean plus the heaviest cell, nor less than
/// (1 - tolerance) times the mean minus the heaviest cell. No part may be empty where there are
/// cells enough.
///
/// Example: 10 cells, 4 parts, tolerance 0 gives 2 to 3.
[[nodiscard]] Balance balance_of(std::span<const double> weights, int64_t num_cells,
                                 int64_t num_parts, double tolerance);

/// Moves cells, along chains of touching parts, until every part is within `balance`. Cells with
/// many neighbours in the target and few at home go first. Local, serial, deterministic.
///
/// @param graph    symmetric neighbours
/// @param weights  per cell, or empty
void repair_balance(const Lists& graph, std::span<const double> weights, const Balance& balance,
                    int64_t num_parts, std::vector<int32_t>& labels);

}  // namespace shardfield::graph
