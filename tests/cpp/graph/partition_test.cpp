#include "shardfield/graph/partition.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <stdexcept>

#include <gtest/gtest.h>

#include "graph/meshes.h"

#include "shardfield/graph/balance.h"
#include "shardfield/graph/library.h"
#include "shardfield/graph/swaps.h"

namespace shardfield::graph {
namespace {

std::vector<int32_t> labels_of(const Mesh& mesh, int64_t parts, const std::string& method,
                               int num_threads = 1) {
  PartitionOptions options;
  options.method = method;
  options.num_threads = num_threads;
  return partition_labels(mesh, parts, options).parts;
}

std::vector<std::string> all_methods() {
  std::vector<std::string> methods = methods_here();
  methods.emplace_back("auto");
  return methods;
}

template <class Error>
std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

TEST(Partition, GivesExactlyNPartsOfEvenSizeWithEveryMethod) {
  const Mesh mesh = box_of_cubes(7, 5, 6);
  for (const std::string& method : all_methods()) {
    for (const int64_t parts : {1, 2, 3, 8, 13}) {
      const auto sizes = sizes_of(labels_of(mesh, parts, method), parts);
      EXPECT_LE(*std::max_element(sizes.begin(), sizes.end()) -
                    *std::min_element(sizes.begin(), sizes.end()),
                1)
          << method << ", " << parts << " parts";
    }
  }
}

TEST(Partition, IsTheSameForAnyThreadsAndAtEveryCall) {
  const Mesh mesh = box_of_tetrahedra(9, 8, 7);
  for (const std::string& method : all_methods()) {
    const auto labels = labels_of(mesh, 6, method, 1);
    for (const int threads : {1, 2, 5})
      EXPECT_EQ(labels_of(mesh, 6, method, threads), labels) << method;
  }
}

TEST(Partition, WeightsAreBalancedWithinTheStatedBounds) {
  const Mesh mesh = box_of_cubes(8, 8, 8);
  std::vector<double> weights(512);
  for (size_t i = 0; i < weights.size(); ++i) weights[i] = i < 256 ? 1 : 3;
  PartitionOptions options;
  options.weights = weights;
  options.ghosts.layers = 1;
  for (const std::string& method : all_methods()) {
    options.method = method;
    const Partition cut = partition(mesh, 5, options);
    for (const double load : cut.quality.loads) EXPECT_NEAR(load, 1024.0 / 5, 3.0) << method;
  }
}

TEST(Partition, AutoIsNeverWorseThanASingleMethod) {
  for (const Mesh& mesh :
       {box_of_cubes(10, 9, 8), box_of_tetrahedra(12, 4, 3), box_of_cubes(20, 3, 2)}) {
    for (const int64_t parts : {2, 6, 16}) {
      PartitionOptions options;
      options.ghosts.layers = 1;
      options.method = "auto";
      const Partition best = partition(mesh, parts, options);
      ASSERT_GE(best.labels.trials.size(), 4U);
      for (const std::string& method : methods_here()) {
        options.method = method;
        EXPECT_LE(best.quality.largest_halo(),
                  partition(mesh, parts, options).quality.largest_halo())
            << method << ", " << parts << " parts";
      }
    }
  }
}

TEST(Partition, QualityOfABoxInTwoHalves) {
  const Mesh mesh = box_of_cubes(4, 3, 2);
  PartitionOptions options;
  options.method = "rcb";
  options.ghosts.layers = 1;
  const Quality quality = partition(mesh, 2, options).quality;
  EXPECT_EQ(quality.cut, 6);
  EXPECT_EQ(quality.cells, (std::vector<int64_t>{12, 12}));
  EXPECT_EQ(quality.halos, (std::vector<int64_t>{6, 6}));
  EXPECT_EQ(quality.facet_halos, (std::vector<int64_t>{6, 6}));
  EXPECT_EQ(quality.fragments, (std::vector<int64_t>{1, 1}));
  EXPECT_EQ(quality.imbalance(), 1);
}

TEST(Partition, RefusesWhatItCannotDo) {
  const Mesh mesh = box_of_cubes(2, 2, 2);
  using Bad = std::invalid_argument;
  const auto with = [&](auto&& change) {
    PartitionOptions options;
    options.method = "hilbert";
    change(options);
    return error_of<Bad>([&] { (void)partition_labels(mesh, 2, options); });
  };
  EXPECT_EQ(with([](auto&) {}), "no error");
  EXPECT_NE(
      with([](auto& o) { o.ghosts.layers = 1; }).find("a cell can be a ghost of several parts"),
      std::string::npos);
  EXPECT_NE(
      with([](auto& o) { o.method = "best"; }).find("here there are auto, hilbert, morton, rcb"),
      std::string::npos);
  EXPECT_NE(with([](auto& o) { o.tolerance = -0.1; }).find("tolerance"), std::string::npos);
  const std::vector<double> few{1, 2};
  EXPECT_NE(with([&](auto& o) { o.weights = few; }).find("one weight for each of 8 cells, got 2"),
            std::string::npos);
  const std::vector<double> negative{1, 1, 1, -2, 1, 1, 1, 1};
  EXPECT_NE(with([&](auto& o) { o.weights = negative; }).find("weight 3 is -2"), std::string::npos);
  const std::vector<double> zeros(8);
  EXPECT_NE(with([&](auto& o) { o.weights = zeros; }).find("positive, finite sum"),
            std::string::npos);
  EXPECT_NE(error_of<Bad>([&] { (void)partition_labels(mesh, 0, {}); }).find("at least 1 part"),
            std::string::npos);
}

// An absent library is an error that names it and says how to get it; nothing is used in its place.
TEST(Partition, AnAbsentLibraryIsAnErrorThatNamesIt) {
  const Mesh mesh = box_of_cubes(3, 3, 3);
  for (const Library library : {Library::metis, Library::kahip, Library::scotch}) {
    if (has_library(library)) {
      EXPECT_EQ(labels_of(mesh, 3, name_of(library)).size(), 27U);
      continue;
    }
    const std::string error =
        error_of<std::runtime_error>([&] { (void)labels_of(mesh, 3, name_of(library)); });
    EXPECT_NE(error.find("\"" + name_of(library) + "\" needs a library that was not found"),
              std::string::npos)
        << error;
  }
}

Lists ring(int64_t n, bool closed) {
  Lists graph;
  for (int64_t i = 0; i < n; ++i) {
    if (closed || i > 0) graph.targets.push_back((i + n - 1) % n);
    if (closed || i + 1 < n) graph.targets.push_back((i + 1) % n);
    graph.offsets.push_back(static_cast<int64_t>(graph.targets.size()));
  }
  return graph;
}

std::vector<std::string> graph_methods() {
  std::vector<std::string> methods{"levels", "auto"};
  for (const Library library : {Library::metis, Library::kahip, Library::scotch}) {
    if (has_library(library)) methods.push_back(name_of(library));
  }
  return methods;
}

std::vector<int64_t> node_sizes(const Lists& graph, int64_t parts, const std::string& method,
                                double tolerance = 0) {
  PartitionOptions options;
  options.method = method;
  options.tolerance = tolerance;
  auto sizes = sizes_of(partition_nodes(graph, {}, parts, options).parts, parts);
  std::sort(sizes.begin(), sizes.end());
  return sizes;
}

// CASES L1: no empty parts on small graphs.
TEST(Cases, L1NoPartIsEmpty) {
  for (const std::string& method : graph_methods()) {
    EXPECT_EQ(node_sizes(ring(5, true), 5, method), (std::vector<int64_t>{1, 1, 1, 1, 1}))
        << method;
    EXPECT_EQ(node_sizes(ring(3, false), 2, method), (std::vector<int64_t>{1, 2})) << method;
    EXPECT_EQ(node_sizes(ring(35, true), 7, method), std::vector<int64_t>(7, 5)) << method;
  }
}

// CASES L3: one part needs no library.
TEST(Cases, L3OnePartIsAllZero) {
  for (const char* method : {"auto", "hilbert", "rcb", "metis", "kahip", "scotch"}) {
    EXPECT_EQ(labels_of(box_of_cubes(3, 2, 2), 1, method), std::vector<int32_t>(12, 0)) << method;
  }
}

// CASES L5: the asked imbalance holds, within one node.
TEST(Cases, L5ImbalanceIsWhatWasAsked) {
  const Lists graph = cells_across_facets(box_of_cubes(12, 10, 9), 1);
  for (const std::string& method : graph_methods()) {
    for (const double tolerance : {0.0, 0.03, 0.5}) {
      const auto sizes = node_sizes(graph, 7, method, tolerance);
      EXPECT_LE(static_cast<double>(sizes.back()), (1 + tolerance) * 1080.0 / 7 + 1)
          << method << ", " << tolerance;
      EXPECT_GE(sizes.front(), 1);
    }
  }
}

// CASES L7: links 0->1, 1->0, 0->1, 2->2. The partition sees the simple graph; the caller's list is
// left as it is, so all four messages exist and the in-degrees are 1, 2, 1.
TEST(Cases, L7DirectedRepeatedAndSelfLinks) {
  const Lists graph{{0, 2, 3, 4}, {1, 1, 0, 2}};
  EXPECT_EQ(symmetric(graph), (Lists{{0, 1, 2, 2}, {1, 0}}));
  for (const std::string& method : graph_methods()) {
    EXPECT_EQ(node_sizes(graph, 2, method), (std::vector<int64_t>{1, 2})) << method;
    EXPECT_EQ(node_sizes(graph, 3, method), (std::vector<int64_t>{1, 1, 1})) << method;
  }
  std::vector<int64_t> in_degree(3);
  for (const int64_t target : graph.targets) ++in_degree[static_cast<size_t>(target)];
  EXPECT_EQ(in_degree, (std::vector<int64_t>{1, 2, 1}));
}

// CASES L11: more parts than cells give single cells and empty parts, without a crash.
TEST(Cases, L11MorePartsThanCells) {
  const Mesh line = row_of_lines(3);
  for (const std::string& method : all_methods()) {
    PartitionOptions options;
    options.method = method;
    options.ghosts.layers = 1;
    const Partition cut = partition(line, 8, options);
    std::vector<int64_t> sizes = cut.quality.cells;
    std::sort(sizes.begin(), sizes.end());
    EXPECT_EQ(sizes, (std::vector<int64_t>{0, 0, 0, 0, 0, 1, 1, 1})) << method;
    EXPECT_EQ(cut.pieces.size(), 8U);
  }
}

TEST(Balance, RepairMakesAnyStartExact) {
  const Lists graph = cells_across_facets(box_of_cubes(6, 6, 6), 1);
  for (const int64_t parts : {2, 5, 9}) {
    std::vector<int32_t> labels(216);  // everything in part 0
    repair_balance(graph, {}, balance_of({}, 216, parts, 0), parts, labels);
    for (const int64_t size : sizes_of(labels, parts)) {
      EXPECT_GE(size, 216 / parts);
      EXPECT_LE(size, (216 + parts - 1) / parts);
    }
  }
}

TEST(Swaps, StraightenARaggedBorder) {
  // A 12 x 6 strip of cubes in two halves whose border zigzags.
  const Mesh mesh = box_of_cubes(12, 6, 1);
  std::vector<int32_t> labels(72);
  for (int64_t x = 0; x < 12; ++x) {
    for (int64_t y = 0; y < 6; ++y) {
      const int64_t border = y % 2 == 0 ? 4 : 8;
      labels[static_cast<size_t>(x * 6 + y)] = static_cast<int32_t>(x >= border);
    }
  }
  const Neighbours neighbours(mesh, {Contact::point, 1, 0}, 1);
  const auto before = halo_sizes(neighbours, labels, 2, 1, 1);
  lower_halos(neighbours.lists(1), {}, balance_of({}, 72, 2, 0), 2, 20, labels);
  const auto after = halo_sizes(neighbours, labels, 2, 1, 1);
  EXPECT_EQ(sizes_of(labels, 2), (std::vector<int64_t>{36, 36}));
  EXPECT_LT(2 * std::max(after[0], after[1]), std::max(before[0], before[1]));
}

}  // namespace
}  // namespace shardfield::graph
