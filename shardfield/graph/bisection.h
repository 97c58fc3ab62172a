#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace shardfield::graph {

/// Recursive coordinate bisection: the set of cells is cut across the longest axis of the box of
/// its centers, at the place that divides its parts in halves (3 parts: 1 to 2), until each set is
/// one part (Berger and Bokhari, 1987). Cells in one plane across that axis are told apart by
/// their other coordinates, so a border that must cut a plane cuts it straight too.
///
/// @param centers    (num_cells, 3)
/// @param weights    per cell, or empty: then sizes differ by at most one
/// @return part of each cell; the same for any number of threads
[[nodiscard]] std::vector<int32_t> bisect(std::span<const double> centers,
                                          std::span<const double> weights, int64_t num_parts,
                                          int num_threads);

}  // namespace shardfield::graph
