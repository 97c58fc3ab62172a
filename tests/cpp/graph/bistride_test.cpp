#include "shardfield/graph/bistride.h"

#include <algorithm>
#include <random>
#include <stdexcept>

#include <gtest/gtest.h>

namespace shardfield::graph {
namespace {

Lists from_rows(const std::vector<std::vector<int64_t>>& rows) {
  Lists out;
  for (const auto& row : rows) {
    out.targets.insert(out.targets.end(), row.begin(), row.end());
    out.offsets.push_back(static_cast<int64_t>(out.targets.size()));
  }
  return out;
}

/// A grid of points with links to the 4 around each.
Lists grid(int64_t width, int64_t height) {
  std::vector<std::vector<int64_t>> rows;
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      std::vector<int64_t> row;
      if (x > 0) row.push_back(y * width + x - 1);
      if (y > 0) row.push_back((y - 1) * width + x);
      rows.push_back(row);
    }
  }
  return symmetric(from_rows(rows));
}

/// Number of components, by joining sets.
int64_t components(const Lists& graph) {
  std::vector<int64_t> root(static_cast<size_t>(graph.num_rows()));
  for (size_t i = 0; i < root.size(); ++i) root[i] = static_cast<int64_t>(i);
  const auto top = [&](int64_t i) {
    while (root[static_cast<size_t>(i)] != i) i = root[static_cast<size_t>(i)];
    return i;
  };
  int64_t count = graph.num_rows();
  for (int64_t i = 0; i < graph.num_rows(); ++i) {
    for (const int64_t other : graph[i]) {
      const int64_t a = top(i);
      const int64_t b = top(other);
      if (a == b) continue;
      root[static_cast<size_t>(a)] = b;
      --count;
    }
  }
  return count;
}

TEST(Bistride, APathKeepsTheFewerOfItsLayers) {
  const Lists path = symmetric(from_rows({{1}, {2}, {3}, {4}, {}}));
  const auto levels = bistride_levels(path, 2);
  EXPECT_EQ(levels[0].nodes, (std::vector<int64_t>{1, 3}));
  EXPECT_EQ(levels[0].links, from_rows({{1}, {0}}));
  EXPECT_EQ(levels[1].nodes, (std::vector<int64_t>{0}));  // a tie: even layers
  EXPECT_EQ(levels[1].links, from_rows({{}}));
}

TEST(Bistride, ARingOfFiveKeepsItsOddLayer) {
  // A ring of 5 from 0: layers {0}, {1, 4}, {2, 3}; the odd layer is smaller, 1 and 4 meet at 0.
  const Lists ring = symmetric(from_rows({{1}, {2}, {3}, {4}, {0}}));
  EXPECT_EQ(bistride_levels(ring, 1)[0].nodes, (std::vector<int64_t>{1, 4}));
  EXPECT_EQ(bistride_levels(ring, 1)[0].links, from_rows({{1}, {0}}));
}

TEST(Bistride, IsolatedNodesAndNoNodesStay) {
  const auto levels = bistride_levels(from_rows({{}, {2}, {1}, {}}), 3);
  EXPECT_EQ(levels[0].nodes, (std::vector<int64_t>{0, 1, 3}));
  EXPECT_EQ(levels[2].nodes, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_TRUE(bistride_levels(Lists{}, 1)[0].nodes.empty());
  EXPECT_TRUE(bistride_levels(grid(3, 3), 0).empty());
}

TEST(Bistride, LevelsHalveAndComponentsStayInOnePiece) {
  std::mt19937 draw(3);
  std::vector<std::vector<int64_t>> drawn(60);
  for (auto& row : drawn) row.push_back(static_cast<int64_t>(draw() % 60));
  for (const Lists& graph : {grid(9, 7), symmetric(from_rows(drawn))}) {
    Lists finer = graph;
    const auto levels = bistride_levels(graph, 3);
    for (const CoarseLevel& level : levels) {
      const auto count = static_cast<int64_t>(level.nodes.size());
      EXPECT_LE(2 * count, finer.num_rows() + components(finer));
      EXPECT_EQ(components(level.links), components(finer));
      EXPECT_EQ(level.links, symmetric(level.links));
      // Each node is kept or has a kept neighbour.
      for (int64_t i = 0; i < finer.num_rows(); ++i) {
        const auto is_kept = [&](int64_t node) {
          return std::binary_search(level.nodes.begin(), level.nodes.end(), node);
        };
        EXPECT_TRUE(is_kept(i) || std::any_of(finer[i].begin(), finer[i].end(), is_kept));
      }
      finer = level.links;
    }
  }
}

TEST(Bistride, FewerThanNoLevelsIsAnError) {
  EXPECT_THROW((void)bistride_levels(grid(2, 2), -1), std::invalid_argument);
}

}  // namespace
}  // namespace shardfield::graph
