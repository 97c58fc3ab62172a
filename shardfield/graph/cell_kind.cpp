#include "shardfield/graph/cell_kind.h"

#include <stdexcept>

namespace shardfield::graph {

namespace {

constexpr int kNumNumbers = 30;

constexpr std::array<CellShape, kNumNumbers> make_shapes() {
  std::array<CellShape, kNumNumbers> table{};
  const auto set = [&](CellKind kind, CellShape shape) {
    table[static_cast<size_t>(kind)] = shape;
  };
  set(CellKind::vertex, {"vertex", 0, 1, 1});
  set(CellKind::poly_vertex, {"poly_vertex", 0, 0, 0});
  set(CellKind::line, {"line", 1, 2, 2});
  set(CellKind::poly_line, {"poly_line", 1, 0, 0});
  set(CellKind::triangle, {"triangle", 2, 3, 3});
  set(CellKind::triangle_strip, {"triangle_strip", 2, 0, 0});
  set(CellKind::polygon, {"polygon", 2, 0, 0});
  set(CellKind::pixel, {"pixel", 2, 4, 4});
  set(CellKind::quad, {"quad", 2, 4, 4});
  set(CellKind::tetra, {"tetra", 3, 4, 4});
  set(CellKind::voxel, {"voxel", 3, 8, 8});
  set(CellKind::hexahedron, {"hexahedron", 3, 8, 8});
  set(CellKind::wedge, {"wedge", 3, 6, 6});
  set(CellKind::pyramid, {"pyramid", 3, 5, 5});
  set(CellKind::line3, {"line3", 1, 3, 2});
  set(CellKind::triangle6, {"triangle6", 2, 6, 3});
  set(CellKind::quad8, {"quad8", 2, 8, 4});
  set(CellKind::tetra10, {"tetra10", 3, 10, 4});
  set(CellKind::hexahedron20, {"hexahedron20", 3, 20, 8});
  set(CellKind::wedge15, {"wedge15", 3, 15, 6});
  set(CellKind::pyramid13, {"pyramid13", 3, 13, 5});
  set(CellKind::quad9, {"quad9", 2, 9, 4});
  set(CellKind::hexahedron27, {"hexahedron27", 3, 27, 8});
  return table;
}

constexpr std::array<CellShape, kNumNumbers> kShapes = make_shapes();

constexpr std::array<Facet, 2> kLine{{{1, {0}}, {1, {1}}}};
constexpr std::array<Facet, 3> kTriangle{{{2, {0, 1}}, {2, {1, 2}}, {2, {2, 0}}}};
constexpr std::array<Facet, 4> kQuad{{{2, {0, 1}}, {2, {1, 2}}, {2, {2, 3}}, {2, {3, 0}}}};
constexpr std::array<Facet, 4> kPixel{{{2, {0, 1}}, {2, {1, 3}}, {2, {3, 2}}, {2, {2, 0}}}};
constexpr std::array<Facet, 4> kTetra{
    {{3, {0, 1, 2}}, {3, {0, 1, 3}}, {3, {1, 2, 3}}, {3, {0, 2, 3}}}};
constexpr std::array<Facet, 6> kHexahedron{{{4, {0, 1, 2, 3}},
                                            {4, {4, 5, 6, 7}},
                                            {4, {0, 1, 5, 4}},
                                            {4, {1, 2, 6, 5}},
                                            {4, {2, 3, 7, 6}},
                                            {4, {3, 0, 4, 7}}}};
constexpr std::array<Facet, 6> kVoxel{{{4, {0, 1, 2, 3}},
                                       {4, {4, 5, 6, 7}},
                                       {4, {0, 1, 4, 5}},
                                       {4, {1, 3, 5, 7}},
                                       {4, {3, 2, 7, 6}},
                                       {4, {2, 0, 6, 4}}}};
constexpr std::array<Facet, 5> kWedge{
    {{3, {0, 1, 2}}, {3, {3, 4, 5}}, {4, {0, 1, 4, 3}}, {4, {1, 2, 5, 4}}, {4, {2, 0, 3, 5}}}};
constexpr std::array<Facet, 5> kPyramid{
    {{4, {0, 1, 2, 3}}, {3, {0, 1, 4}}, {3, {1, 2, 4}}, {3, {2, 3, 4}}, {3, {3, 0, 4}}}};

}  // namespace

bool is_known_kind(int number) {
  return number >= 0 && number < kNumNumbers &&
         kShapes[static_cast<size_t>(number)].name != nullptr;
}

const CellShape& shape_of(CellKind kind) {
  const int number = static_cast<int>(kind);
  if (!is_known_kind(number)) {
    throw std::invalid_argument(
        "mesh: cell kind " + std::to_string(number) + " is not known" +
        (number == 42 ? " (a polyhedron)" : "") +
        "; expected a VTK number from vertex (1) to hexahedron27 (29), convert such cells first");
  }
  return kShapes[static_cast<size_t>(number)];
}

std::span<const Facet> facets_of(CellKind kind) {
  switch (kind) {
    case CellKind::line:
    case CellKind::line3:
      return kLine;
    case CellKind::triangle:
    case CellKind::triangle6:
      return kTriangle;
    case CellKind::pixel:
      return kPixel;
    case CellKind::quad:
    case CellKind::quad8:
    case CellKind::quad9:
      return kQuad;
    case CellKind::tetra:
    case CellKind::tetra10:
      return kTetra;
    case CellKind::voxel:
      return kVoxel;
    case CellKind::hexahedron:
    case CellKind::hexahedron20:
    case CellKind::hexahedron27:
      return kHexahedron;
    case CellKind::wedge:
    case CellKind::wedge15:
      return kWedge;
    case CellKind::pyramid:
    case CellKind::pyramid13:
      return kPyramid;
    default:
      return {};
  }
}

}  // namespace shardfield::graph
