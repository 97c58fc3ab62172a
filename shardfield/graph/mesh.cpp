#include "shardfield/graph/mesh.h"

#include <cmath>
#include <stdexcept>
#include <string>

#include "shardfield/graph/parallel.h"

namespace shardfield::graph {

namespace {

[[noreturn]] void fail(const std::string& text) {
  throw std::invalid_argument("mesh: " + text);
}

std::string cell_name(int64_t cell, CellKind kind) {
  return "cell " + std::to_string(cell) + " (" + shape_of(kind).name + ")";
}

void check_points(std::span<const double> points, int dim) {
  for (size_t i = 0; i < points.size(); ++i) {
    if (!std::isfinite(points[i])) {
      fail("coordinate " + std::to_string(i % static_cast<size_t>(dim)) + " of point " +
           std::to_string(i / static_cast<size_t>(dim)) + " is " +
           (std::isnan(points[i]) ? "NaN" : "infinite") + "; expected finite coordinates");
    }
  }
}

/// Fewest nodes that make a cell of a kind without a fixed number.
int least_nodes(CellKind kind) {
  return kind == CellKind::polygon || kind == CellKind::triangle_strip ? 3
         : kind == CellKind::poly_line                                 ? 2
                                                                       : 1;
}

/// The offsets must describe consecutive, non-overlapping lists inside `nodes`.
void check_offsets(const CellBlock& block, int64_t first_cell) {
  if (block.offsets.empty()) return;
  if (block.offsets[0] != 0 || block.offsets[block.offsets.size() - 1] != block.nodes.size()) {
    fail("the offsets of the block that starts with cell " + std::to_string(first_cell) +
         " run from " + std::to_string(block.offsets[0]) + " to " +
         std::to_string(block.offsets[block.offsets.size() - 1]) + "; expected 0 to " +
         std::to_string(block.nodes.size()) + ", the number of nodes listed");
  }
  for (int64_t i = 0; i + 1 < block.offsets.size(); ++i) {
    if (block.offsets[i + 1] < block.offsets[i]) {
      fail("the offset after cell " + std::to_string(first_cell + i) + " is " +
           std::to_string(block.offsets[i + 1]) + ", less than the one before it, " +
           std::to_string(block.offsets[i]) + "; offsets must ascend");
    }
  }
}

/// True where a corner is listed twice. Polylines and strips may pass through a point again.
bool repeats_corner(CellKind kind, std::span<const int64_t> nodes) {
  if (kind == CellKind::poly_line || kind == CellKind::triangle_strip) return false;
  const int listed = shape_of(kind).num_corners;
  const size_t corners = listed == 0 ? nodes.size() : static_cast<size_t>(listed);
  for (size_t i = 0; i < corners; ++i) {
    for (size_t j = i + 1; j < corners; ++j) {
      if (nodes[i] == nodes[j]) return true;
    }
  }
  return false;
}

void check_cell(int64_t cell, CellKind kind, std::span<const int64_t> nodes, int64_t num_points) {
  const CellShape& shape = shape_of(kind);
  const auto count = static_cast<int64_t>(nodes.size());
  if (shape.num_nodes != 0 && count != shape.num_nodes) {
    fail(cell_name(cell, kind) + " lists " + std::to_string(count) + " nodes; expected " +
         std::to_string(shape.num_nodes));
  }
  if (shape.num_nodes == 0 && count < least_nodes(kind)) {
    fail(cell_name(cell, kind) + " lists " + std::to_string(count) + " nodes; expected at least " +
         std::to_string(least_nodes(kind)));
  }
  for (const int64_t node : nodes) {
    if (node < 0 || node >= num_points) {
      fail(cell_name(cell, kind) + " names point " + std::to_string(node) + "; expected 0 to " +
           std::to_string(num_points - 1));
    }
  }
  if (repeats_corner(kind, nodes)) {
    fail(cell_name(cell, kind) +
         " has the same point at two corners; expected distinct corners, "
         "remove degenerate cells first");
  }
}

}  // namespace

int64_t CellBlock::num_cells() const {
  if (!kinds.empty()) return kinds.size();
  if (!offsets.empty()) return offsets.size() - 1;
  return nodes.size() / fixed_nodes_;
}

CellBlock CellBlock::uniform(CellKind kind, Array<int64_t> nodes) {
  const CellShape& shape = shape_of(kind);
  if (shape.num_nodes == 0) {
    fail(std::string("cells of kind ") + shape.name +
         " need offsets: each has its own number of "
         "nodes");
  }
  if (nodes.size() % shape.num_nodes != 0) {
    fail("a block of kind " + std::string(shape.name) + " lists " + std::to_string(nodes.size()) +
         " nodes; expected a multiple of " + std::to_string(shape.num_nodes));
  }
  CellBlock block;
  block.kind = kind;
  block.nodes = std::move(nodes);
  block.fixed_nodes_ = shape.num_nodes;
  return block;
}

CellBlock CellBlock::ragged(CellKind kind, Array<int64_t> nodes, Array<int64_t> offsets) {
  if (offsets.empty()) fail("offsets are empty; expected one more than there are cells");
  CellBlock block;
  block.kind = kind;
  block.nodes = std::move(nodes);
  block.offsets = std::move(offsets);
  return block;
}

CellBlock CellBlock::mixed(Array<uint8_t> kinds, Array<int64_t> nodes, Array<int64_t> offsets) {
  if (offsets.size() != kinds.size() + 1) {
    fail("there are " + std::to_string(offsets.size()) + " offsets for " +
         std::to_string(kinds.size()) + " cells; expected one more than cells");
  }
  CellBlock block;
  block.nodes = std::move(nodes);
  block.offsets = std::move(offsets);
  block.kinds = std::move(kinds);
  return block;
}

Mesh::Mesh(Array<double> points, int dim, std::vector<CellBlock> blocks)
    : points_(std::move(points)), dim_(dim), blocks_(std::move(blocks)) {
  if (dim < 1 || dim > 3) fail("points have " + std::to_string(dim) + " coordinates; expected 1-3");
  if (points_.size() % dim != 0) {
    fail(std::to_string(points_.size()) + " coordinates are no multiple of " + std::to_string(dim));
  }
  for (const CellBlock& block : blocks_) {
    check_offsets(block, first_cell_.back());
    first_cell_.push_back(first_cell_.back() + block.num_cells());
  }
  if (num_points() == 0 || num_cells() == 0) {
    fail("it is empty (" + std::to_string(num_points()) + " points, " +
         std::to_string(num_cells()) + " cells); expected at least one cell");
  }
  check_points(points_.values, dim);
  for_each_cell(0, num_cells(), [&](int64_t cell, CellKind kind, std::span<const int64_t> nodes) {
    if (!is_known_kind(static_cast<int>(kind))) {
      fail("cell " + std::to_string(cell) + " has kind " + std::to_string(static_cast<int>(kind)) +
           "; expected a VTK number from vertex (1) to hexahedron27 (29), convert such cells "
           "first");
    }
    check_cell(cell, kind, nodes, num_points());
    cell_dim_ = std::max(cell_dim_, shape_of(kind).dim);
  });
}

std::vector<double> Mesh::centroids(int num_threads) const {
  std::vector<double> centers(static_cast<size_t>(num_cells()) * 3);
  parallel_ranges(num_cells(), num_threads, [&](int64_t begin, int64_t end) {
    for_each_cell(begin, end, [&](int64_t cell, CellKind, std::span<const int64_t> nodes) {
      double* center = centers.data() + cell * 3;
      for (const int64_t node : nodes) {
        const double* x = points_.values.data() + node * dim_;
        for (int axis = 0; axis < dim_; ++axis) center[axis] += x[axis];
      }
      for (int axis = 0; axis < dim_; ++axis) center[axis] /= static_cast<double>(nodes.size());
    });
  });
  return centers;
}

}  // namespace shardfield::graph
