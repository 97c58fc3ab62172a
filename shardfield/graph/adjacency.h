#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/graph/mesh.h"

namespace shardfield::graph {

/// Lists of numbers, one per row: row i is targets[offsets[i]] .. targets[offsets[i + 1] - 1].
/// Example: rows {1, 2}, {}, {0} have offsets 0, 2, 2, 3 and targets 1, 2, 0.
struct Lists {
  std::vector<int64_t> offsets{0};
  std::vector<int64_t> targets;

  [[nodiscard]] int64_t num_rows() const { return static_cast<int64_t>(offsets.size()) - 1; }
  [[nodiscard]] std::span<const int64_t> operator[](int64_t row) const {
    const auto begin = static_cast<size_t>(offsets[static_cast<size_t>(row)]);
    const auto end = static_cast<size_t>(offsets[static_cast<size_t>(row) + 1]);
    return std::span<const int64_t>(targets).subspan(begin, end - begin);
  }
  friend bool operator==(const Lists&, const Lists&) = default;
};

/// Row p: the cells that have point p, ascending.
[[nodiscard]] Lists cells_of_points(const Mesh& mesh);

/// Row c: the cells that share a facet with cell c (a face of volumes, an edge of surfaces, an end
/// of lines), each once, ascending; never c itself. A surface cell that lies on a volume's face is
/// that volume's neighbour, likewise lines on surfaces. Facets of more than two cells join all.
[[nodiscard]] Lists cells_across_facets(const Mesh& mesh, int num_threads);

/// Row c: the cells that share a point with cell c, each once, ascending; never c itself.
[[nodiscard]] Lists cells_around(const Mesh& mesh, const Lists& cells_of_point, int num_threads);

/// The same rows with both directions of every pair, without repeats and self-loops, ascending.
/// Example: rows {1, 1}, {}, {2} become {1}, {0}, {}.
[[nodiscard]] Lists symmetric(const Lists& graph);

}  // namespace shardfield::graph
