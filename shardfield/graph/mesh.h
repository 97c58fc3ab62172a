#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shardfield/graph/array.h"
#include "shardfield/graph/cell_kind.h"

namespace shardfield::graph {

/// A run of cells of a mesh, in one of three forms:
///   one kind, a fixed number of nodes:  kind, nodes (num_cells * num_nodes of the kind)
///   one kind, own numbers of nodes:     kind, nodes, offsets (num_cells + 1): cell i has
///                                       nodes[offsets[i]] .. nodes[offsets[i + 1] - 1]
///   any kinds, in any order:            kinds (num_cells), nodes, offsets
struct CellBlock {
  CellKind kind = CellKind::vertex;
  Array<int64_t> nodes;    ///< Point numbers.
  Array<int64_t> offsets;  ///< Empty where every cell has the kind's number of nodes.
  Array<uint8_t> kinds;    ///< CellKind per cell; empty where all are `kind`.

  [[nodiscard]] int64_t num_cells() const;
  [[nodiscard]] CellKind kind_of(int64_t cell) const {
    return kinds.empty() ? kind : static_cast<CellKind>(kinds[cell]);
  }
  /// Point numbers of one cell of this block.
  [[nodiscard]] std::span<const int64_t> nodes_of(int64_t cell) const {
    if (offsets.empty()) {
      const auto width = static_cast<size_t>(fixed_nodes_);
      return nodes.values.subspan(static_cast<size_t>(cell) * width, width);
    }
    const auto begin = static_cast<size_t>(offsets[cell]);
    return nodes.values.subspan(begin, static_cast<size_t>(offsets[cell + 1]) - begin);
  }

  /// A block of one kind with a fixed number of nodes.
  static CellBlock uniform(CellKind kind, Array<int64_t> nodes);
  /// A block of one kind whose cells differ in their number of nodes (polygons).
  static CellBlock ragged(CellKind kind, Array<int64_t> nodes, Array<int64_t> offsets);
  /// A block of any kinds.
  static CellBlock mixed(Array<uint8_t> kinds, Array<int64_t> nodes, Array<int64_t> offsets);

 private:
  int fixed_nodes_ = 1;
};

/// A mesh whose arrays may belong to somebody else: nothing is copied on the way in.
/// Cells are numbered through the blocks in order. Fields (point and cell data) stay with the
/// caller: pieces say by number which rows they take.
class Mesh {
 public:
  /// Local. Checks everything that later loops rely on.
  ///
  /// @param points  coordinates, (num_points, dim) row-major
  /// @param dim     1, 2 or 3 coordinates per point
  /// @param blocks  the cells
  /// @throws std::invalid_argument for an empty mesh, a point that is NaN or infinite, a node
  ///   number out of range, offsets that do not ascend, a cell with too few or repeated corners;
  ///   the message names the cell (numbered through all blocks) or point.
  Mesh(Array<double> points, int dim, std::vector<CellBlock> blocks);

  [[nodiscard]] int dim() const { return dim_; }
  [[nodiscard]] int64_t num_points() const { return points_.size() / dim_; }
  [[nodiscard]] int64_t num_cells() const { return first_cell_.back(); }
  [[nodiscard]] const Array<double>& points() const { return points_; }
  [[nodiscard]] const std::vector<CellBlock>& blocks() const { return blocks_; }
  /// Number of the first cell of block `b`.
  [[nodiscard]] int64_t first_cell(size_t b) const { return first_cell_[b]; }
  /// Largest topological dimension of a cell.
  [[nodiscard]] int cell_dim() const { return cell_dim_; }

  [[nodiscard]] std::span<const double> point(int64_t p) const {
    return points_.values.subspan(static_cast<size_t>(p * dim_), static_cast<size_t>(dim_));
  }
  [[nodiscard]] std::span<const int64_t> nodes_of(int64_t cell) const {
    const size_t b = block_of(cell);
    return blocks_[b].nodes_of(cell - first_cell_[b]);
  }
  [[nodiscard]] CellKind kind_of(int64_t cell) const {
    const size_t b = block_of(cell);
    return blocks_[b].kind_of(cell - first_cell_[b]);
  }
  [[nodiscard]] size_t block_of(int64_t cell) const {
    return static_cast<size_t>(std::upper_bound(first_cell_.begin(), first_cell_.end(), cell) -
                               first_cell_.begin()) -
           1;
  }

  /// Calls visit(cell, kind, nodes) for the cells begin <= cell < end, in order.
  template <class Visit>
  void for_each_cell(int64_t begin, int64_t end, Visit&& visit) const {
    for (size_t b = 0; b < blocks_.size(); ++b) {
      const int64_t first = first_cell_[b];
      const int64_t stop = std::min(end, first_cell_[b + 1]);
      for (int64_t cell = std::max(begin, first); cell < stop; ++cell) {
        visit(cell, blocks_[b].kind_of(cell - first), blocks_[b].nodes_of(cell - first));
      }
    }
  }

  /// Mean of each cell's nodes, (num_cells, 3); coordinates that the mesh lacks are 0.
  [[nodiscard]] std::vector<double> centroids(int num_threads) const;

 private:
  Array<double> points_;
  int dim_;
  std::vector<CellBlock> blocks_;
  std::vector<int64_t> first_cell_{0};
  int cell_dim_ = 0;
};

}  // namespace shardfield::graph
