#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>

namespace shardfield::graph {

/// Kinds of cells, by the numbers that VTK files use.
enum class CellKind : uint8_t {
  vertex = 1,
  poly_vertex = 2,
  line = 3,
  poly_line = 4,
  triangle = 5,
  triangle_strip = 6,
  polygon = 7,
  pixel = 8,
  quad = 9,
  tetra = 10,
  voxel = 11,
  hexahedron = 12,
  wedge = 13,
  pyramid = 14,
  line3 = 21,
  triangle6 = 22,
  quad8 = 23,
  tetra10 = 24,
  hexahedron20 = 25,
  wedge15 = 26,
  pyramid13 = 27,
  quad9 = 28,
  hexahedron27 = 29,
};

/// What the library knows about one kind.
struct CellShape {
  const char* name;
  int dim;          ///< Topological dimension: 0 point, 1 line, 2 surface, 3 volume.
  int num_nodes;    ///< Nodes per cell; 0 where every cell has its own number.
  int num_corners;  ///< The first nodes are the corners; 0 where all nodes are.
};

/// @throws std::invalid_argument for a number that is no kind of this library (polyhedra among
/// them), naming it.
[[nodiscard]] const CellShape& shape_of(CellKind kind);

/// True for the numbers of CellKind.
[[nodiscard]] bool is_known_kind(int number);

/// Most corners that a facet of a fixed kind has.
inline constexpr int kMaxFacetCorners = 4;

/// One facet of a cell with a fixed number of nodes: positions in the cell's list of nodes.
struct Facet {
  int num_corners = 0;
  std::array<int8_t, kMaxFacetCorners> corners{};
};

/// Facets of a kind with a fixed number of nodes: faces of volumes, edges of surfaces, ends of
/// lines. Empty for points and for kinds whose cells differ (their facets are the edges between
/// consecutive nodes: see for_each_facet in adjacency.h).
[[nodiscard]] std::span<const Facet> facets_of(CellKind kind);

}  // namespace shardfield::graph
