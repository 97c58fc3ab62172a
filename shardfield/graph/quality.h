#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/graph/adjacency.h"
#include "shardfield/graph/ghosts.h"

namespace shardfield::graph {

/// How good a partition is. Largest parts set the time of a step, so they come with the sums.
struct Quality {
  std::vector<int64_t> cells;        ///< Own cells per part.
  std::vector<double> loads;         ///< Weight per part (the cells where unweighted).
  std::vector<int64_t> halos;        ///< Ghost cells per part under the rule asked for.
  std::vector<int64_t> facet_halos;  ///< Cells of other parts across a facet, per part.
  std::vector<int64_t> fragments;    ///< Connected pieces (across facets) of each part.
  int64_t cut = 0;                   ///< Facets between different parts.

  [[nodiscard]] int64_t largest_halo() const;
  [[nodiscard]] int64_t total_halo() const;
  [[nodiscard]] int64_t total_facet_halo() const;
  /// Largest load over the mean load; 1 is perfect.
  [[nodiscard]] double imbalance() const;
};

/// Measures a partition. Local; the same for any number of threads.
///
/// @param across   cells_across_facets of the mesh (or a graph's symmetric neighbours)
/// @param halos    halo_sizes under the wanted rule
/// @param weights  per cell, or empty
[[nodiscard]] Quality measure(const Lists& across, std::vector<int64_t> halos,
                              std::span<const int32_t> labels, int64_t num_parts,
                              std::span<const double> weights);

}  // namespace shardfield::graph
