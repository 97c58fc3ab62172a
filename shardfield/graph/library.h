#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shardfield/graph/adjacency.h"

namespace shardfield::graph {

/// Partitioners that other people wrote. None is linked: each is loaded when first asked for, from
/// the path in SHARDFIELD_METIS, SHARDFIELD_KAHIP or SHARDFIELD_SCOTCH, then from the paths given
/// to add_library_path, then from wherever the system's loader finds it.
enum class Library { metis, kahip, scotch };

/// What to minimise, and how hard to try.
struct LibraryOptions {
  bool volume = false;       ///< METIS only: communication volume instead of edges cut.
  std::string mode = "eco";  ///< KaHIP only: "fast", "eco" or "strong".
  double tolerance = 0;      ///< Allowed imbalance; 0 asks for the least that the library takes.
  int seed = 0;              ///< KaHIP and Scotch; METIS always starts alike.
};

/// Where to look for a library. Local.
void add_library_path(Library library, const std::string& path);

/// Whether the library can be loaded here. Local.
[[nodiscard]] bool has_library(Library library);

/// Name for messages and method lists: "metis", "kahip", "scotch".
[[nodiscard]] std::string name_of(Library library);

/// Partitions with a library. Local; the same labels at every call.
///
/// @param graph    symmetric, without self-loops
/// @param weights  per node, or empty; scaled to integers for the library
/// @throws std::runtime_error when the library is not there, naming it and how to get it, when the
///   graph is too large for its integers, or when it reports a failure.
[[nodiscard]] std::vector<int32_t> partition_with(Library library, const Lists& graph,
                                                  std::span<const double> weights,
                                                  int64_t num_parts, const LibraryOptions& options);

}  // namespace shardfield::graph
