#include "shardfield/graph/halo_graph.h"

#include <random>
#include <stdexcept>

#include <gtest/gtest.h>

namespace shardfield::graph {
namespace {

/// A graph that owns its arrays.
struct Owned {
  std::vector<std::vector<int32_t>> owners;
  struct Links {
    int64_t source_kind, target_kind;
    std::vector<int64_t> sources, targets;
  };
  std::vector<Links> relations;
  int64_t num_parts = 1;

  [[nodiscard]] WholeGraph whole() const {
    WholeGraph graph;
    graph.num_parts = num_parts;
    for (const auto& list : owners) graph.owners.emplace_back(list);
    for (const auto& r : relations) {
      graph.relations.push_back({r.source_kind, r.target_kind, r.sources, r.targets});
    }
    return graph;
  }
};

Owned random_graph(int64_t num_nodes, int64_t num_links, int64_t parts, uint32_t seed) {
  std::mt19937 draw(seed);
  Owned graph;
  graph.num_parts = parts;
  graph.owners.resize(2);
  for (auto& owners : graph.owners) {
    for (int64_t i = 0; i < num_nodes; ++i) {
      // The last part stays empty, and a third of the nodes get no links below.
      owners.push_back(
          static_cast<int32_t>(draw() % static_cast<uint32_t>(std::max<int64_t>(1, parts - 1))));
    }
  }
  for (const auto& [from, to] : {std::pair{0, 0}, std::pair{0, 1}, std::pair{1, 0}}) {
    Owned::Links links{from, to, {}, {}};
    const auto most = static_cast<uint32_t>(std::max<int64_t>(1, 2 * num_nodes / 3));
    for (int64_t i = 0; i < num_links; ++i) {
      links.sources.push_back(draw() % most);
      links.targets.push_back(draw() % 5 == 0 && from == to ? links.sources.back() : draw() % most);
    }
    graph.relations.push_back(links);
  }
  return graph;
}

TEST(HaloGraph, ExampleFromTheHeader) {
  const Owned graph{{{0, 0, 1}}, {{0, 0, {0, 1}, {1, 2}}}, 2};
  const auto parts = cut_graph(graph.whole(), 1);
  EXPECT_EQ(parts[0].kinds[0].nodes, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(parts[0].relations[0].links, (std::vector<int64_t>{0}));
  EXPECT_EQ(parts[1].kinds[0].nodes, (std::vector<int64_t>{2, 1}));
  EXPECT_EQ(parts[1].relations[0].links, (std::vector<int64_t>{1}));
  EXPECT_EQ(parts[1].relations[0].num_interior, 0);
  ASSERT_EQ(parts[0].kinds[0].exchange.sends.size(), 1U);
  EXPECT_EQ(parts[0].kinds[0].exchange.sends[0].rows, (std::vector<int64_t>{1}));
}

TEST(HaloGraph, EveryCutPassesTheChecker) {
  for (const int64_t parts : {1, 2, 3, 5}) {
    for (const int64_t hops : {1, 2, 3}) {
      for (uint32_t seed = 0; seed < 4; ++seed) {
        const Owned graph = random_graph(30, 40, parts, seed);
        EXPECT_TRUE(faults_of(graph.whole(), cut_graph(graph.whole(), hops)).empty());
      }
    }
  }
  const Owned empty = random_graph(6, 0, 3, 1);
  EXPECT_TRUE(faults_of(empty.whole(), cut_graph(empty.whole(), 1)).empty());
}

/// Sums along links, layer by layer, on the whole graph.
std::vector<std::vector<int64_t>> serial_layers(const Owned& graph, int layers) {
  std::vector<std::vector<int64_t>> value;
  for (const auto& owners : graph.owners) {
    value.emplace_back();
    for (size_t i = 0; i < owners.size(); ++i) value.back().push_back(static_cast<int64_t>(i + 1));
  }
  for (int layer = 0; layer < layers; ++layer) {
    auto next = value;
    for (const auto& r : graph.relations) {
      for (size_t i = 0; i < r.sources.size(); ++i) {
        next[static_cast<size_t>(r.target_kind)][static_cast<size_t>(r.targets[i])] +=
            value[static_cast<size_t>(r.source_kind)][static_cast<size_t>(r.sources[i])];
      }
    }
    value = next;
  }
  return value;
}

TEST(HaloGraph, SeveralHopsServeSeveralLayersWithoutExchange) {
  for (const int hops : {1, 2, 3}) {
    const Owned graph = random_graph(40, 60, 4, 7);
    const auto expected = serial_layers(graph, hops);
    for (const HaloPart& part : cut_graph(graph.whole(), hops)) {
      std::vector<std::vector<int64_t>> value;
      for (const LocalNodes& nodes : part.kinds) {
        value.emplace_back();
        for (const int64_t node : nodes.nodes) value.back().push_back(node + 1);
      }
      for (int layer = 0; layer < hops; ++layer) {
        auto next = value;
        for (size_t r = 0; r < part.relations.size(); ++r) {
          const LocalLinks& links = part.relations[r];
          const auto& whole = graph.relations[r];
          for (size_t i = 0; i < links.links.size(); ++i) {
            next[static_cast<size_t>(whole.target_kind)][static_cast<size_t>(links.targets[i])] +=
                value[static_cast<size_t>(whole.source_kind)]
                     [static_cast<size_t>(links.sources[i])];
          }
        }
        value = next;
      }
      for (size_t kind = 0; kind < value.size(); ++kind) {
        for (int64_t i = 0; i < part.kinds[kind].exchange.num_owned; ++i) {
          const auto node = static_cast<size_t>(part.kinds[kind].nodes[static_cast<size_t>(i)]);
          EXPECT_EQ(value[kind][static_cast<size_t>(i)], expected[kind][node]);
        }
      }
    }
  }
}

TEST(HaloGraph, TheCheckerSeesEveryKindOfDamage) {
  const Owned graph = random_graph(20, 30, 3, 3);
  const auto good = cut_graph(graph.whole(), 1);
  const auto damaged = [&](auto&& damage) {
    auto parts = good;
    damage(parts);
    return faults_of(graph.whole(), parts);
  };
  using Parts = std::vector<HaloPart>;
  EXPECT_TRUE(damaged([](Parts&) {}).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p.pop_back(); }).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p[0].kinds[0].nodes[0] = p[0].kinds[0].nodes[1]; }).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p[1].kinds[1].owners[0] = 2; }).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p[0].relations[0].sources[0] += 1; }).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p[0].relations[0].num_interior += 1; }).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p[0].relations[1].in_degrees[0] += 1; }).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p[1].relations[2].out_degrees[0] -= 1; }).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p[0].kinds[0].exchange.sends[0].rows[0] += 1; }).empty());
  EXPECT_FALSE(damaged([](Parts& p) { p[0].kinds[0].exchange.receives.clear(); }).empty());
  EXPECT_FALSE(damaged([](Parts& p) {
                 LocalLinks& links = p[0].relations[0];  // one link lost, as if it were a repeat
                 links.links.pop_back();
                 links.sources.pop_back();
                 links.targets.pop_back();
                 links.num_interior =
                     std::min(links.num_interior, static_cast<int64_t>(links.links.size()));
               }).empty());
}

TEST(HaloGraph, CostOfBothWays) {
  // A line 0 -> 1 -> 2 -> 3 cut in the middle, three layers.
  const Owned graph{{{0, 0, 1, 1}}, {{0, 0, {0, 1, 2}, {1, 2, 3}}}, 2};
  const HaloCost per_layer = cost_of(cut_graph(graph.whole(), 1), 3, true);
  EXPECT_EQ(per_layer.exchanged_rows, 3);
  EXPECT_EQ(per_layer.redundant_links, 0);
  const HaloCost at_once = cost_of(cut_graph(graph.whole(), 3), 3, false);
  EXPECT_EQ(at_once.exchanged_rows, 2);
  EXPECT_EQ(at_once.redundant_links, 2);  // 0 -> 1 in layers 1 and 2 on the second part
}

TEST(HaloGraph, NamesTheBrokenLink) {
  const auto error_of = [](const Owned& graph, int64_t hops) -> std::string {
    try {
      (void)cut_graph(graph.whole(), hops);
    } catch (const std::invalid_argument& error) {
      return error.what();
    }
    return "no error";
  };
  EXPECT_NE(error_of({{{0, 0}}, {{0, 0, {0, 1}, {1, 2}}}, 1}, 1)
                .find("link 1 of relation 0 has target 2"),
            std::string::npos);
  EXPECT_NE(error_of({{{0, 3}}, {}, 2}, 1).find("node 1 has label 3"), std::string::npos);
  EXPECT_NE(error_of({{{0}}, {}, 1}, 0).find("at least 1 hop"), std::string::npos);
  EXPECT_NE(error_of({{{0}}, {{0, 0, {0}, {}}}, 1}, 1).find("1 sources and 0 targets"),
            std::string::npos);
}

// CASES M5: the star 0 -> 1, 2, 3 cut into {0, 1} and {2, 3}: wherever node 0 is seen, three links
// leave it.
TEST(Cases, M5DegreesAreThoseOfTheWholeGraph) {
  const Owned graph{{{0, 0, 1, 1}}, {{0, 0, {0, 0, 0}, {1, 2, 3}}}, 2};
  for (const HaloPart& part : cut_graph(graph.whole(), 1)) {
    const auto& nodes = part.kinds[0].nodes;
    const auto at = std::find(nodes.begin(), nodes.end(), 0) - nodes.begin();
    ASSERT_LT(at, static_cast<std::ptrdiff_t>(nodes.size()));
    EXPECT_EQ(part.relations[0].out_degrees[static_cast<size_t>(at)], 3);
  }
}

}  // namespace
}  // namespace shardfield::graph
