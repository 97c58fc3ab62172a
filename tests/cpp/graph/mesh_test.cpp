#include "shardfield/graph/mesh.h"

#include <cmath>
#include <limits>
#include <stdexcept>

#include <gtest/gtest.h>

#include "graph/meshes.h"

#include "shardfield/graph/adjacency.h"
#include "shardfield/graph/ghosts.h"

namespace shardfield::graph {
namespace {

Array<double> square_points() {
  return Array<double>::owning({0, 0, 1, 0, 1, 1, 0, 1, 2, 0, 2, 1});
}

Mesh triangles(std::vector<int64_t> nodes) {
  return Mesh(square_points(), 2,
              {CellBlock::uniform(CellKind::triangle, Array<int64_t>::owning(std::move(nodes)))});
}

std::string error_of(const std::function<void()>& make) {
  try {
    make();
  } catch (const std::invalid_argument& error) {
    return error.what();
  }
  return "no error";
}

TEST(Mesh, BorrowsItsArrays) {
  const std::vector<double> points{0, 0, 0, 1, 0, 0, 0, 1, 0};
  const std::vector<int64_t> nodes{0, 1, 2};
  const Mesh mesh(Array<double>(points), 3,
                  {CellBlock::uniform(CellKind::triangle, Array<int64_t>(nodes))});
  EXPECT_EQ(mesh.points().values.data(), points.data());
  EXPECT_EQ(mesh.nodes_of(0).data(), nodes.data());
  EXPECT_EQ(mesh.num_points(), 3);
  EXPECT_EQ(mesh.cell_dim(), 2);
}

TEST(Mesh, NumbersCellsThroughMixedBlocks) {
  const auto uniform = CellBlock::uniform(CellKind::quad, Array<int64_t>::owning({0, 1, 2, 3}));
  const auto ragged =
      CellBlock::ragged(CellKind::polygon, Array<int64_t>::owning({1, 4, 5, 2, 1, 4, 5}),
                        Array<int64_t>::owning({0, 4, 7}));
  const auto mixed =
      CellBlock::mixed(Array<uint8_t>::owning({3, 5}), Array<int64_t>::owning({0, 1, 0, 1, 2}),
                       Array<int64_t>::owning({0, 2, 5}));
  const Mesh mesh(square_points(), 2, {uniform, ragged, mixed});
  EXPECT_EQ(mesh.num_cells(), 5);
  EXPECT_EQ(mesh.kind_of(0), CellKind::quad);
  EXPECT_EQ(mesh.kind_of(2), CellKind::polygon);
  EXPECT_EQ(mesh.nodes_of(2).size(), 3U);
  EXPECT_EQ(mesh.kind_of(3), CellKind::line);
  EXPECT_EQ(mesh.kind_of(4), CellKind::triangle);
  std::vector<int64_t> visited;
  mesh.for_each_cell(1, 4, [&](int64_t cell, CellKind, auto) { visited.push_back(cell); });
  EXPECT_EQ(visited, (std::vector<int64_t>{1, 2, 3}));
  const std::vector<double> centers = mesh.centroids(2);
  EXPECT_EQ(centers[0], 0.5);
  EXPECT_EQ(centers[3], 1.5);
  EXPECT_EQ(centers[5], 0);
}

TEST(Mesh, NamesTheBrokenCellOrPoint) {
  EXPECT_EQ(error_of([] { triangles({0, 1, 2, 0, 2, 6}); }),
            "mesh: cell 1 (triangle) names point 6; expected 0 to 5");
  EXPECT_EQ(error_of([] { triangles({0, 1, -1}); }),
            "mesh: cell 0 (triangle) names point -1; expected 0 to 5");
  EXPECT_NE(error_of([] { triangles({0, 1, 2, 3, 3, 4}); }).find("cell 1 (triangle) has the same"),
            std::string::npos);
  EXPECT_NE(error_of([] { triangles({0, 1, 2, 3}); }).find("multiple of 3"), std::string::npos);
  EXPECT_NE(error_of([] { triangles({}); }).find("it is empty"), std::string::npos);
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const auto with_points = [](std::vector<double> points) {
    return error_of([&] {
      Mesh(Array<double>::owning(std::move(points)), 2,
           {CellBlock::uniform(CellKind::line, Array<int64_t>::owning({0, 1}))});
    });
  };
  EXPECT_NE(with_points({0, 0, 1, nan}).find("coordinate 1 of point 1 is NaN"), std::string::npos);
  EXPECT_NE(with_points({0, 0, INFINITY, 1}).find("point 1 is infinite"), std::string::npos);
  EXPECT_NE(with_points({}).find("it is empty"), std::string::npos);
}

TEST(Mesh, NamesBrokenOffsetsAndKinds) {
  const auto polygons = [](std::vector<int64_t> offsets) {
    return error_of([&] {
      Mesh(square_points(), 2,
           {CellBlock::ragged(CellKind::polygon, Array<int64_t>::owning({0, 1, 2, 3, 4, 5}),
                              Array<int64_t>::owning(std::move(offsets)))});
    });
  };
  EXPECT_EQ(polygons({0, 3, 6}), "no error");
  EXPECT_NE(polygons({0, 3, 5}).find("run from 0 to 5; expected 0 to 6"), std::string::npos);
  EXPECT_NE(polygons({0, 7, 6}).find("offset after cell 1 is 6, less than"), std::string::npos);
  EXPECT_NE(polygons({0, 2, 6}).find("cell 0 (polygon) lists 2 nodes; expected at least 3"),
            std::string::npos);
  const auto kind = [](uint8_t number) {
    return error_of([&] {
      Mesh(square_points(), 2,
           {CellBlock::mixed(Array<uint8_t>::owning({3, number}),
                             Array<int64_t>::owning({0, 1, 2, 3}),
                             Array<int64_t>::owning({0, 2, 4}))});
    });
  };
  EXPECT_EQ(kind(3), "no error");
  EXPECT_NE(kind(42).find("cell 1 has kind 42"), std::string::npos);
  EXPECT_NE(kind(5).find("cell 1 (triangle) lists 2 nodes; expected 3"), std::string::npos);
}

TEST(Adjacency, FacetsJoinCellsOfEveryKind) {
  // A cube, a wedge on its right face, a pyramid on top, and a tetrahedron on the pyramid's side.
  const Mesh mesh(
      Array<double>::owning({0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 0,  0,  1, 1,  0,  1,
                             1, 1, 1, 0, 1, 1, 2, 0, 0, 2, 1, 0, .5, .5, 2, .5, -1, 2}),
      3,
      {CellBlock::uniform(CellKind::hexahedron, Array<int64_t>::owning({0, 1, 2, 3, 4, 5, 6, 7})),
       CellBlock::uniform(CellKind::wedge, Array<int64_t>::owning({1, 8, 5, 2, 9, 6})),
       CellBlock::uniform(CellKind::pyramid, Array<int64_t>::owning({4, 5, 6, 7, 10})),
       CellBlock::uniform(CellKind::tetra, Array<int64_t>::owning({4, 5, 10, 11})),
       CellBlock::uniform(CellKind::quad, Array<int64_t>::owning({0, 1, 2, 3})),
       CellBlock::uniform(CellKind::triangle, Array<int64_t>::owning({4, 10, 11}))});
  const Lists across = cells_across_facets(mesh, 1);
  const auto row = [&](int64_t cell) {
    return std::vector<int64_t>(across[cell].begin(), across[cell].end());
  };
  EXPECT_EQ(row(0), (std::vector<int64_t>{1, 2, 4}));
  EXPECT_EQ(row(1), (std::vector<int64_t>{0}));
  EXPECT_EQ(row(2), (std::vector<int64_t>{0, 3}));
  EXPECT_EQ(row(3), (std::vector<int64_t>{2, 5}));
  EXPECT_EQ(row(4), (std::vector<int64_t>{0}));
  EXPECT_EQ(row(5), (std::vector<int64_t>{3}));
}

TEST(Adjacency, CountsOfABox) {
  const Mesh mesh = box_of_cubes(5, 4, 3);
  const Lists across = cells_across_facets(mesh, 2);
  EXPECT_EQ(across.targets.size(), 2U * (4 * 4 * 3 + 5 * 3 * 3 + 5 * 4 * 2));
  const Lists around = cells_around(mesh, cells_of_points(mesh), 2);
  EXPECT_EQ(around[0].size(), 7U);
  EXPECT_EQ(around[1 * 12 + 1 * 3 + 1].size(), 26U);
  EXPECT_EQ(symmetric(across), across);
  EXPECT_EQ(Neighbours(mesh, {Contact::facet, 1, 0}, 1).lists(1), across);
  EXPECT_EQ(Neighbours(mesh, {Contact::radius, 1, 1.01}, 1).lists(1), across);
  EXPECT_EQ(Neighbours(mesh, {Contact::radius, 1, 1.74}, 1).lists(1), around);
}

TEST(Adjacency, SecondOrderCellsShareFacetsByTheirCorners) {
  const Mesh mesh(
      square_points(), 2,
      {CellBlock::uniform(CellKind::triangle6, Array<int64_t>::owning({0, 1, 2, 3, 4, 5})),
       CellBlock::uniform(CellKind::triangle, Array<int64_t>::owning({2, 1, 5}))});
  const Lists across = cells_across_facets(mesh, 1);
  EXPECT_EQ(across.targets, (std::vector<int64_t>{1, 0}));
}

TEST(Adjacency, SymmetricDropsRepeatsAndLoops) {
  const Lists graph{{0, 2, 2, 3}, {1, 1, 2}};
  EXPECT_EQ(symmetric(graph), (Lists{{0, 1, 2, 2}, {1, 0}}));
}

}  // namespace
}  // namespace shardfield::graph
