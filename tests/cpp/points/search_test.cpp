// Searches over ranks that are threads, beside all distances.

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "shardfield/points/boxes.h"
#include "shardfield/shardfield.h"

namespace {

using at::Tensor;
using shardfield::points::Boxes;

Tensor numbers(int64_t count, int64_t dims, double phase) {
  return at::sin(at::arange(count * dims, at::kDouble) * 12.9 + phase).view({count, dims});
}

TEST(Points, SearchesEqualAllDistances) {
  const Tensor points = numbers(50, 3, 0), queries = numbers(20, 3, 1);
  const Tensor all = at::cdist(queries, points, 2.0, 2);
  const auto [want, order] = all.sort(1);
  const Tensor near = (all <= 0.8).sum();
  for (const int64_t ranks : {1, 2, 3, 4}) {
    shardfield::run_in_process({ranks}, [&](const shardfield::Mesh& mesh) {
      const Tensor p = shardfield::shard_tensor(points, mesh, {0});
      const Tensor q = shardfield::shard_tensor(queries, mesh, {0});
      const auto nearest = shardfield::knn(p, q, 5);
      EXPECT_TRUE(at::equal(shardfield::full_tensor(nearest.indices), order.narrow(1, 0, 5)));
      EXPECT_TRUE(at::allclose(shardfield::full_tensor(nearest.distances), want.narrow(1, 0, 5)));
      const auto pairs = shardfield::radius_search(p, q, 0.8);
      EXPECT_EQ(pairs.indices.size(1), near.item<int64_t>());
      EXPECT_TRUE(shardfield::is_sharded(pairs.indices));
      EXPECT_THROW(shardfield::knn(p, q, 51), c10::Error);
    });
  }
}

TEST(Points, BoxesHoldTheirPoints) {
  const Tensor points = numbers(300, 2, 0);
  const std::vector<double> reach(300, 0.25);
  const Boxes boxes = Boxes::from_table(Boxes::around(points, reach, 8).table(8));
  std::vector<std::pair<double, int64_t>> extent;
  boxes.add_extent(points.const_data_ptr<double>(), extent);
  EXPECT_EQ(extent.size(), 8U);
  int64_t held = 0;
  for (const auto& [squared, count] : extent) held += count;
  EXPECT_EQ(held, 300);
  for (int64_t i = 0; i < 300; ++i)
    EXPECT_EQ(boxes.squared_distance(points.const_data_ptr<double>() + 2 * i), 0);
  const std::vector<double> away{3.0, 0.0};
  EXPECT_GT(boxes.squared_distance(away.data()), 3.9);
  EXPECT_FALSE(boxes.reach_to(away.data()));
  EXPECT_TRUE(boxes.reach_to(points.const_data_ptr<double>()));
  const Boxes empty = Boxes::around(points.narrow(0, 0, 0), {}, 8);
  EXPECT_TRUE(std::isinf(empty.squared_distance(away.data())));
  EXPECT_FALSE(empty.reach_to(points.const_data_ptr<double>()));
}

}  // namespace
