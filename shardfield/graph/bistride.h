#pragma once

#include <cstdint>
#include <vector>

#include "shardfield/graph/adjacency.h"

namespace shardfield::graph {

/// A level of a hierarchy of graphs.
struct CoarseLevel {
  std::vector<int64_t> nodes;  ///< Number of each node in the level above, ascending.
  Lists links;                 ///< Symmetric, of this level's own numbers, without self-loops.
};

/// Coarser and coarser levels of a graph by bi-stride pooling (Cao et al., "Efficient Learning of
/// Mesh-Based Physical Simulation with BSMS-GNN", 2023): a breadth-first search from the lowest
/// number of each component puts its nodes into layers; every other layer is kept, the even ones
/// unless the odd ones are fewer; nodes at most two links apart are linked. Each component stays in
/// one piece, and no node loses all kept nodes around it. Local, deterministic.
///
/// @param graph       symmetric, without self-loops (see symmetric in adjacency.h)
/// @param num_levels  how many coarser levels; at least 0
/// @throws std::invalid_argument for fewer than 0 levels.
///
/// Example: the path 0-1-2-3-4 has the layers 0, 1, 2, 3, 4. The odd ones are fewer: the coarser
/// level has the nodes 1 and 3, and one link between them, 0-1 in its own numbers.
[[nodiscard]] std::vector<CoarseLevel> bistride_levels(const Lists& graph, int64_t num_levels);

}  // namespace shardfield::graph
