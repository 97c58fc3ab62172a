#include "shardfield/spec/adaptive.h"

#include <cmath>
#include <stdexcept>

#include <gtest/gtest.h>

#include "moved_rows.h"
#include "random_draws.h"

namespace shardfield::spec {
namespace {

using Sizes = std::vector<int64_t>;

TEST(Adaptive, WorkedExample) {
  EXPECT_EQ(adaptive_window(0, 5, 3), (Range{0, 2}));
  EXPECT_EQ(adaptive_window(1, 5, 3), (Range{1, 4}));
  EXPECT_EQ(adaptive_window(2, 5, 3), (Range{3, 5}));
  const Sizes sizes{3, 2};
  const auto pieces = plan_adaptive(sizes, 3);
  EXPECT_EQ(pieces[0], (MappedPiece{{0, 2}, {0, 4}}));
  EXPECT_EQ(pieces[1], (MappedPiece{{2, 3}, {3, 5}}));
  EXPECT_EQ(moved(sizes, pieces), 1);
}

TEST(Adaptive, OutputsArePartitionedAndTheirWindowsNeeded) {
  Draws draws;
  for (int i = 0; i < 3000; ++i) {
    Sizes sizes = draws.sizes(draws.in(1, 6), 0, 9);
    sizes[0] += 1;
    const int64_t rows = total_of(sizes);
    const int64_t outputs = draws.in(1, 20);
    int64_t next = 0;
    for (const MappedPiece& piece : plan_adaptive(sizes, outputs)) {
      EXPECT_EQ(piece.outputs.begin, next);
      next = piece.outputs.end;
      Range all{rows, 0};
      for (int64_t o = piece.outputs.begin; o < piece.outputs.end; ++o) {
        const double ratio = static_cast<double>(rows) / static_cast<double>(outputs);
        const auto begin = static_cast<int64_t>(std::floor(static_cast<double>(o) * ratio + 1e-9));
        const auto end = static_cast<int64_t>(std::ceil(static_cast<double>(o + 1) * ratio - 1e-9));
        all = {std::min(all.begin, begin), std::max(all.end, end)};
      }
      if (!piece.outputs.empty()) {
        EXPECT_EQ(piece.inputs, all) << join(sizes) << " to " << outputs;
      } else {
        EXPECT_TRUE(piece.inputs.empty());
      }
    }
    EXPECT_EQ(next, outputs);
  }
}

TEST(Adaptive, TwoRanksMoveAsFewRowsAsAnyPlacement) {
  Draws draws;
  for (int i = 0; i < 2000; ++i) {
    const Sizes sizes = draws.sizes(2, 1, 30);
    const int64_t rows = total_of(sizes);
    const int64_t outputs = draws.in(1, 40);
    int64_t fewest = rows;
    for (int64_t border = 0; border <= outputs; ++border) {
      const int64_t reach = border == 0 ? 0 : adaptive_window(border - 1, rows, outputs).end;
      const int64_t start = border == outputs ? rows : adaptive_window(border, rows, outputs).begin;
      fewest = std::min(
          fewest, std::max<int64_t>(reach - sizes[0], 0) + std::max<int64_t>(sizes[0] - start, 0));
    }
    EXPECT_EQ(moved(sizes, plan_adaptive(sizes, outputs)), fewest)
        << join(sizes) << " to " << outputs;
  }
}

TEST(Adaptive, DivisibleCutsMoveNothing) {
  const Sizes sizes{8, 4, 0, 4};
  EXPECT_EQ(moved(sizes, plan_adaptive(sizes, 4)), 0);
  EXPECT_EQ(moved(sizes, plan_adaptive(sizes, 16)), 0);
}

TEST(Adaptive, RefusesOutputsWithoutRows) {
  const Sizes none{0, 0};
  EXPECT_THROW((void)plan_adaptive(none, 2), std::invalid_argument);
}

}  // namespace
}  // namespace shardfield::spec
