// Meshes for the tests: boxes of hexahedra, of tetrahedra, and lines.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "shardfield/graph/mesh.h"

namespace shardfield::graph {

/// nx * ny * nz unit cubes; points and cells numbered with z running fastest.
inline Mesh box_of_cubes(int64_t nx, int64_t ny, int64_t nz) {
  std::vector<double> points;
  for (int64_t x = 0; x <= nx; ++x) {
    for (int64_t y = 0; y <= ny; ++y) {
      for (int64_t z = 0; z <= nz; ++z) {
        points.insert(points.end(),
                      {static_cast<double>(x), static_cast<double>(y), static_cast<double>(z)});
      }
    }
  }
  const auto at = [&](int64_t x, int64_t y, int64_t z) {
    return (x * (ny + 1) + y) * (nz + 1) + z;
  };
  std::vector<int64_t> nodes;
  for (int64_t x = 0; x < nx; ++x) {
    for (int64_t y = 0; y < ny; ++y) {
      for (int64_t z = 0; z < nz; ++z) {
        nodes.insert(nodes.end(), {at(x, y, z), at(x + 1, y, z), at(x + 1, y + 1, z),
                                   at(x, y + 1, z), at(x, y, z + 1), at(x + 1, y, z + 1),
                                   at(x + 1, y + 1, z + 1), at(x, y + 1, z + 1)});
      }
    }
  }
  return Mesh(Array<double>::owning(std::move(points)), 3,
              {CellBlock::uniform(CellKind::hexahedron, Array<int64_t>::owning(std::move(nodes)))});
}

/// `n` unit segments in a row.
inline Mesh row_of_lines(int64_t n) {
  std::vector<double> points;
  std::vector<int64_t> nodes;
  for (int64_t i = 0; i <= n; ++i) points.push_back(static_cast<double>(i));
  for (int64_t i = 0; i < n; ++i) nodes.insert(nodes.end(), {i, i + 1});
  return Mesh(Array<double>::owning(std::move(points)), 1,
              {CellBlock::uniform(CellKind::line, Array<int64_t>::owning(std::move(nodes)))});
}

/// Each cube of a box cut into six tetrahedra along its diagonal.
inline Mesh box_of_tetrahedra(int64_t nx, int64_t ny, int64_t nz) {
  const Mesh cubes = box_of_cubes(nx, ny, nz);
  constexpr std::array<std::array<int, 4>, 6> kSixth{
      {{0, 1, 2, 6}, {0, 2, 3, 6}, {0, 3, 7, 6}, {0, 7, 4, 6}, {0, 4, 5, 6}, {0, 5, 1, 6}}};
  std::vector<int64_t> nodes;
  for (int64_t cell = 0; cell < cubes.num_cells(); ++cell) {
    const auto corners = cubes.nodes_of(cell);
    for (const auto& tetra : kSixth) {
      for (const int corner : tetra) nodes.push_back(corners[static_cast<size_t>(corner)]);
    }
  }
  return Mesh(cubes.points(), 3,
              {CellBlock::uniform(CellKind::tetra, Array<int64_t>::owning(std::move(nodes)))});
}

/// Number of cells of each part.
inline std::vector<int64_t> sizes_of(const std::vector<int32_t>& labels, int64_t num_parts) {
  std::vector<int64_t> sizes(static_cast<size_t>(num_parts));
  for (const int32_t part : labels) ++sizes.at(static_cast<size_t>(part));
  return sizes;
}

}  // namespace shardfield::graph
