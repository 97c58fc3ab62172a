#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/graph/adjacency.h"
#include "shardfield/graph/balance.h"

namespace shardfield::graph {

/// Lowers the largest halo by swapping border cells between touching parts (Fiduccia-Mattheyses
/// passes per pair of parts, undone back to the best state). The halo of a part is the number of
/// cells of other parts that touch it; each pass lowers the sum of a high power of both halos, for
/// the pairs of which one is nearly the largest.
/// Balance is kept wherever it held before. Local, serial, deterministic.
///
/// @param graph   symmetric neighbours under the contact that the halo is counted with
/// @param rounds  passes over all pairs of parts
void lower_halos(const Lists& graph, std::span<const double> weights, const Balance& balance,
                 int64_t num_parts, int rounds, std::vector<int32_t>& labels);

}  // namespace shardfield::graph
