#include "shardfield/spec/pad.h"

#include <stdexcept>

#include <gtest/gtest.h>

#include "random_draws.h"

namespace shardfield::spec {
namespace {

using Sizes = std::vector<int64_t>;
using Rows = std::vector<int64_t>;

constexpr PadMode kModes[] = {PadMode::kConstant, PadMode::kReflect, PadMode::kReplicate,
                              PadMode::kCircular};

/// Row `i` steps outside the rows, on the low or the high side, as the mode's definition says.
int64_t walk_outwards(const Rows& inner, int64_t i, bool low, PadMode mode) {
  switch (mode) {
    case PadMode::kConstant:
      return -1;
    case PadMode::kReplicate:
      return low ? inner.front() : inner.back();
    case PadMode::kCircular:
      return low ? *(inner.end() - 1 - i) : *(inner.begin() + i);
    case PadMode::kReflect:
      break;
  }
  return low ? *(inner.begin() + 1 + i) : *(inner.end() - 2 - i);
}

/// The padded dim, built by walking outwards from the rows instead of by index arithmetic.
Rows padded_by_walking(int64_t rows, int64_t lo, int64_t hi, PadMode mode) {
  Rows inner;
  for (int64_t row = 0; row < rows; ++row) {
    inner.push_back(row);
  }
  Rows out = inner;
  for (int64_t i = 0; i < lo; ++i) {
    out.insert(out.begin(), walk_outwards(inner, i, true, mode));
  }
  for (int64_t i = 0; i < hi; ++i) {
    out.push_back(walk_outwards(inner, i, false, mode));
  }
  if (lo < 0) {
    out.erase(out.begin(), out.begin() - lo);
  }
  if (hi < 0) {
    out.erase(out.end() + hi, out.end());
  }
  return out;
}

Rows expand(const std::vector<Segment>& segments) {
  Rows rows;
  for (const Segment& segment : segments) {
    for (int64_t i = 0; i < segment.count; ++i) {
      rows.push_back(segment.at(i));
    }
  }
  return rows;
}

TEST(PadSource, WorkedExample) {
  EXPECT_EQ(pad_segments({0, 4}, 4, 2, PadMode::kReflect),
            (std::vector<Segment>{{2, 2, -1}, {0, 2, 1}}));
  EXPECT_EQ(pad_source(0, 4, 2, PadMode::kReflect), 2);
  EXPECT_EQ(pad_source(0, 4, 2, PadMode::kReplicate), 0);
  EXPECT_EQ(pad_source(0, 4, 2, PadMode::kCircular), 2);
  EXPECT_EQ(pad_source(0, 4, 2, PadMode::kConstant), -1);
  EXPECT_EQ(pad_source(7, 1, 2, PadMode::kReflect), 0);
}

TEST(PlanPad, RandomPaddingsShowTheRightRows) {
  Draws draws;
  for (int i = 0; i < 3000; ++i) {
    const PadMode mode = kModes[draws.in(0, 3)];
    Sizes sizes = draws.sizes(draws.in(1, 5), 0, 6);
    sizes[static_cast<size_t>(draws.in(0, static_cast<int64_t>(sizes.size()) - 1))] += 1;
    const int64_t rows = total_of(sizes);
    const int64_t most = mode == PadMode::kReflect ? rows - 1 : rows;
    const int64_t lo = draws.in(-rows / 2, most);
    const int64_t hi = draws.in(-rows / 2, most);
    const PadPlan plan = plan_pad(sizes, lo, hi, mode);
    Rows all;
    int64_t next = 0;
    for (size_t rank = 0; rank < sizes.size(); ++rank) {
      const PadPiece& piece = plan.pieces[rank];
      const Rows shown = expand(plan.rows.wanted[rank]);
      EXPECT_EQ(piece.outputs.begin, next);
      next = piece.outputs.end;
      EXPECT_EQ(piece.zeros_lo + static_cast<int64_t>(shown.size()) + piece.zeros_hi,
                piece.outputs.size());
      all.insert(all.end(), static_cast<size_t>(piece.zeros_lo), -1);
      all.insert(all.end(), shown.begin(), shown.end());
      all.insert(all.end(), static_cast<size_t>(piece.zeros_hi), -1);
    }
    EXPECT_EQ(all, padded_by_walking(rows, lo, hi, mode))
        << join(sizes) << " pad " << lo << ", " << hi << " mode " << static_cast<int>(mode);
    EXPECT_EQ(plan.rows.sizes, sizes);
    (void)plan_messages(plan.rows, 0);
  }
}

TEST(PlanPad, ConstantAndReplicateMoveNothing) {
  const Sizes sizes{0, 3, 2, 0};
  EXPECT_EQ(rows_moved(plan_pad(sizes, 4, 4, PadMode::kConstant).rows), 0);
  EXPECT_EQ(rows_moved(plan_pad(sizes, 4, 4, PadMode::kReplicate).rows), 0);
}

TEST(PlanPad, WorkedExample) {
  const Sizes sizes{2, 2};
  const PadPlan plan = plan_pad(sizes, 1, 1, PadMode::kCircular);
  EXPECT_EQ(plan.rows.wanted[0], (std::vector<Segment>{{3, 1, 1}, {0, 2, 1}}));
  EXPECT_EQ(plan.rows.wanted[1], (std::vector<Segment>{{2, 2, 1}, {0, 1, 1}}));
  EXPECT_EQ(rows_moved(plan.rows), 2);
}

TEST(PlanPad, RefusesWhatPyTorchRefuses) {
  const Sizes sizes{2, 2};
  EXPECT_THROW((void)plan_pad(sizes, 4, 0, PadMode::kReflect), std::invalid_argument);
  EXPECT_THROW((void)plan_pad(sizes, 0, 5, PadMode::kCircular), std::invalid_argument);
  EXPECT_THROW((void)plan_pad(sizes, -3, -2, PadMode::kConstant), std::invalid_argument);
  const Sizes none{0};
  EXPECT_THROW((void)plan_pad(none, 1, 0, PadMode::kReplicate), std::invalid_argument);
}

}  // namespace
}  // namespace shardfield::spec
