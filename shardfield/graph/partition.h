#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "shardfield/graph/ghosts.h"
#include "shardfield/graph/mesh.h"
#include "shardfield/graph/pieces.h"
#include "shardfield/graph/quality.h"

namespace shardfield::graph {

/// How to cut.
struct PartitionOptions {
  /// "auto", "hilbert", "morton", "rcb", and where their libraries are found "metis", "kahip",
  /// "scotch". "auto" tries all that suit the mesh, keeps the one whose largest part has the
  /// smallest halo under `ghosts`, and then swaps border cells to lower it further.
  std::string method = "auto";
  std::span<const double> weights;  ///< Per cell, or empty.
  /// How far a part may exceed the mean load. 0 without weights: sizes differ by at most one cell.
  double tolerance = 0;
  GhostRule ghosts{Contact::point, 0, 0};
  int num_threads = 0;  ///< 0: one per core. Never changes the result.
  int seed = 0;         ///< For the libraries.
  /// Told what is being done, before it is: "hilbert", "rcb", "ghosts", ...
  std::function<void(const std::string&)> progress;
};

/// One method that "auto" tried.
struct Trial {
  std::string method;
  int64_t largest_halo = 0;
  int64_t total_halo = 0;
  double imbalance = 1;
  double seconds = 0;
};

struct Labels {
  std::vector<int32_t> parts;  ///< Part of each cell.
  std::string method;          ///< What made them, e.g. "rcb" or "metis+swaps".
  std::vector<Trial> trials;   ///< What "auto" tried; else the one method.
};

struct Partition {
  Labels labels;
  std::vector<Piece> pieces;
  Quality quality;
};

/// Part of every cell. Local and deterministic; no ghosts, because a cell can be a ghost of
/// several parts.
///
/// Exactly `num_parts` parts: labels run from 0 to num_parts - 1, and parts are empty only where
/// there are fewer cells than parts. One part needs no method: all labels are 0.
///
/// @throws std::invalid_argument for num_parts < 1, an unknown method (the message lists those
///   here), weights that are not one finite, non-negative number per cell with a positive sum,
///   a negative tolerance, or nonzero ghost layers
/// @throws std::runtime_error for a library that is not there, or that fails
[[nodiscard]] Labels partition_labels(const Mesh& mesh, int64_t num_parts,
                                      const PartitionOptions& options);

/// Labels, pieces with ghosts and exchange plans, and their quality. Local; errors as above.
[[nodiscard]] Partition partition(const Mesh& mesh, int64_t num_parts,
                                  const PartitionOptions& options);

/// Pieces and quality of a partition that is already known. Local; method and weights of the
/// options only count for the quality.
/// @throws std::invalid_argument when labels are not one per cell in 0 .. num_parts - 1
[[nodiscard]] Partition partition_by_labels(const Mesh& mesh, std::vector<int32_t> labels,
                                            int64_t num_parts, const PartitionOptions& options);

/// Part of every node of a graph: "metis", "kahip", "scotch", "levels" (breadth-first halving,
/// always there) or "auto". The graph may be directed, with repeated links, self-loops and
/// isolated nodes: a simple symmetric copy is partitioned. With `coordinates` (num_nodes, 3) also
/// "hilbert", "morton" and "rcb". Errors as above.
[[nodiscard]] Labels partition_nodes(const Lists& graph, std::span<const double> coordinates,
                                     int64_t num_parts, const PartitionOptions& options);

/// Methods that work here, in the order in which "auto" tries them.
[[nodiscard]] std::vector<std::string> methods_here();

}  // namespace shardfield::graph
