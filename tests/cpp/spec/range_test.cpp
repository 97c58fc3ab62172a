#include "shardfield/spec/range.h"

#include <stdexcept>

#include <gtest/gtest.h>

#include "random_draws.h"

#include "shardfield/spec/integer.h"

namespace shardfield::spec {
namespace {

using Sizes = std::vector<int64_t>;

TEST(Range, IntersectsAndShifts) {
  EXPECT_EQ((Range{0, 5}.intersect({3, 9})), (Range{3, 5}));
  EXPECT_TRUE((Range{0, 2}.intersect({3, 9}).empty()));
  EXPECT_TRUE((Range{3, 9}.intersect({0, 2}).empty()));
  EXPECT_EQ((Range{5, 8}.shifted(-5)), (Range{0, 3}));
  EXPECT_EQ((Range{4, 4}.size()), 0);
}

TEST(Range, PiecesAndOwners) {
  const Sizes sizes{3, 0, 2};
  EXPECT_EQ(ranges_of(sizes), (std::vector<Range>{{0, 3}, {3, 3}, {3, 5}}));
  EXPECT_EQ(sizes_of(ranges_of(sizes)), sizes);
  EXPECT_EQ(total_of(sizes), 5);
  EXPECT_EQ(owner_of(sizes, 2), 0);
  EXPECT_EQ(owner_of(sizes, 3), 2);
  EXPECT_EQ(owner_of(sizes, 5), -1);
  EXPECT_EQ(owner_of(sizes, -1), -1);
}

TEST(Sizes, KnownCuts) {
  EXPECT_EQ(chunk_sizes(5, 4), (Sizes{2, 2, 1, 0}));
  EXPECT_EQ(chunk_sizes(197, 3), (Sizes{66, 66, 65}));
  EXPECT_EQ(blockwise_sizes(9, 4), (Sizes{3, 3, 3, 0}));
  EXPECT_EQ(balanced_sizes(9, 4), (Sizes{3, 2, 2, 2}));
  EXPECT_EQ(chunk_sizes(0, 2), (Sizes{0, 0}));
  EXPECT_EQ(balanced_sizes(1, 3), (Sizes{1, 0, 0}));
  EXPECT_THROW((void)chunk_sizes(3, 0), std::invalid_argument);
  EXPECT_THROW((void)balanced_sizes(-1, 2), std::invalid_argument);
}

TEST(Sizes, AddUpForRandomCuts) {
  Draws draws;
  for (int i = 0; i < 500; ++i) {
    const int64_t rows = draws.in(0, 60);
    const int64_t parts = draws.in(1, 12);
    for (const Sizes& sizes : {chunk_sizes(rows, parts), balanced_sizes(rows, parts)}) {
      EXPECT_EQ(total_of(sizes), rows);
      EXPECT_EQ(static_cast<int64_t>(sizes.size()), parts);
      EXPECT_TRUE(std::is_sorted(sizes.rbegin(), sizes.rend())) << join(sizes);
    }
    const Sizes balanced = balanced_sizes(rows, parts);
    EXPECT_LE(balanced.front() - balanced.back(), 1);
  }
}

TEST(Integer, DivisionRoundsTowardsTheNamedSide) {
  for (int64_t dividend = -20; dividend <= 20; ++dividend) {
    for (int64_t divisor = 1; divisor <= 7; ++divisor) {
      const int64_t low = floor_div(dividend, divisor);
      EXPECT_LE(low * divisor, dividend);
      EXPECT_GT((low + 1) * divisor, dividend);
      const int64_t high = ceil_div(dividend, divisor);
      EXPECT_GE(high * divisor, dividend);
      EXPECT_LT((high - 1) * divisor, dividend);
      EXPECT_EQ(floor_mod(dividend, divisor), dividend - low * divisor);
    }
  }
}

}  // namespace
}  // namespace shardfield::spec
