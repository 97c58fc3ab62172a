#include "shardfield/spec/rows.h"

#include <map>
#include <set>
#include <stdexcept>

#include <gtest/gtest.h>

#include "random_draws.h"

#include "shardfield/spec/integer.h"

namespace shardfield::spec {
namespace {

using Sizes = std::vector<int64_t>;
using Rows = std::vector<int64_t>;

Rows expand(const std::vector<Segment>& segments) {
  Rows rows;
  for (const Segment& segment : segments) {
    for (int64_t i = 0; i < segment.count; ++i) {
      rows.push_back(segment.at(i));
    }
  }
  return rows;
}

/// Writes the copied elements; every position may be written once.
void apply(const std::vector<RowCopy>& copies, const Rows& from, Rows& to) {
  for (const RowCopy& copy : copies) {
    EXPECT_EQ(copy.source.count, copy.target.count);
    EXPECT_EQ(copy.target.step, 1);
    for (int64_t i = 0; i < copy.source.count; ++i) {
      int64_t& place = to.at(static_cast<size_t>(copy.target.at(i)));
      EXPECT_EQ(place, -1) << "position written twice";
      place = from.at(static_cast<size_t>(copy.source.at(i)));
    }
  }
}

/// Plays all ranks' messages; a row's value is its global number.
std::vector<Rows> play(const RowPlan& plan, int64_t& rows_sent) {
  const auto ranks = static_cast<int>(plan.sizes.size());
  const auto owned = ranges_of(plan.sizes);
  std::map<std::pair<int, int>, Rows> wire;
  for (int rank = 0; rank < ranks; ++rank) {
    const RowMessages messages = plan_messages(plan, rank);
    rows_sent += messages.rows_sent();
    for (const RowSend& send : messages.sends) {
      Rows rows = expand(send.rows);
      EXPECT_EQ(static_cast<int64_t>(rows.size()), send.num_rows);
      EXPECT_EQ(std::set<int64_t>(rows.begin(), rows.end()).size(), rows.size());
      EXPECT_TRUE(std::is_sorted(rows.begin(), rows.end()));
      for (int64_t& row : rows) {
        EXPECT_LT(row, plan.sizes[static_cast<size_t>(rank)]);
        row += owned[static_cast<size_t>(rank)].begin;
      }
      wire[{rank, send.peer}] = rows;
    }
  }
  std::vector<Rows> results;
  for (int rank = 0; rank < ranks; ++rank) {
    const RowMessages messages = plan_messages(plan, rank);
    Rows result(static_cast<size_t>(messages.num_wanted), -1);
    Rows local;
    for (int64_t i = 0; i < plan.sizes[static_cast<size_t>(rank)]; ++i) {
      local.push_back(owned[static_cast<size_t>(rank)].begin + i);
    }
    apply(messages.copies, local, result);
    for (const RowReceive& receive : messages.receives) {
      const Rows& buffer = wire.at({receive.peer, rank});
      EXPECT_EQ(static_cast<int64_t>(buffer.size()), receive.num_rows);
      apply(receive.places, buffer, result);
      wire.erase({receive.peer, rank});
    }
    results.push_back(result);
  }
  EXPECT_TRUE(wire.empty()) << "a message nobody receives";
  return results;
}

void expect_wanted_rows_arrive(const RowPlan& plan) {
  int64_t sent = 0;
  const auto results = play(plan, sent);
  int64_t fewest = 0;
  for (size_t rank = 0; rank < results.size(); ++rank) {
    const Rows wanted = expand(plan.wanted[rank]);
    EXPECT_EQ(results[rank], wanted) << "rank " << rank << " of sizes " << join(plan.sizes);
    for (const int64_t row : std::set<int64_t>(wanted.begin(), wanted.end())) {
      fewest += owner_of(plan.sizes, row) != static_cast<int>(rank) ? 1 : 0;
    }
    EXPECT_EQ(plan.wanted_sizes()[rank], static_cast<int64_t>(wanted.size()));
  }
  EXPECT_EQ(sent, fewest);
  EXPECT_EQ(rows_moved(plan), fewest);
}

TEST(Messages, WorkedExample) {
  const RowPlan plan{{4, 4}, {{{0, 4, 1}}, {{3, 5, 1}}}};
  const RowMessages first = plan_messages(plan, 0);
  ASSERT_EQ(first.sends.size(), 1U);
  EXPECT_EQ(first.sends[0].peer, 1);
  EXPECT_EQ(first.sends[0].rows, (std::vector<Segment>{{3, 1, 1}}));
  EXPECT_TRUE(first.receives.empty());
  const RowMessages second = plan_messages(plan, 1);
  ASSERT_EQ(second.receives.size(), 1U);
  EXPECT_EQ(second.receives[0].places, (std::vector<RowCopy>{{{0, 1, 1}, {0, 1, 1}}}));
  EXPECT_EQ(second.copies, (std::vector<RowCopy>{{{0, 4, 1}, {1, 4, 1}}}));
  EXPECT_EQ(second.rows_received(), 1);
}

TEST(Messages, RandomWantedRowsArriveOnceEach) {
  Draws draws;
  for (int i = 0; i < 2000; ++i) {
    RowPlan plan;
    plan.sizes = draws.sizes(draws.in(1, 5), 0, 6);
    const int64_t rows = total_of(plan.sizes);
    plan.wanted.resize(plan.sizes.size());
    for (auto& wanted : plan.wanted) {
      for (int64_t k = rows == 0 ? 0 : draws.in(0, 4); k > 0; --k) {
        const int64_t start = draws.in(0, rows - 1);
        const int64_t step = draws.in(-3, 3);
        int64_t count = 1;
        while (draws.once_in(2) || draws.once_in(2)) {
          const int64_t next = start + count * step;
          if (next < 0 || next >= rows || count > 12) {
            break;
          }
          ++count;
        }
        wanted.push_back({start, count, step});
      }
    }
    expect_wanted_rows_arrive(plan);
  }
}

TEST(Messages, RefusesRowsThatDoNotExist) {
  EXPECT_THROW((void)plan_messages({{2, 2}, {{{3, 2, 1}}, {}}}, 0), std::invalid_argument);
  EXPECT_THROW((void)plan_messages({{2, 2}, {{}, {{0, 2, -1}}}}, 0), std::invalid_argument);
  EXPECT_THROW((void)plan_messages({{2, 2}, {{}}}, 0), std::invalid_argument);
  EXPECT_THROW((void)plan_messages({{2, 2}, {{}, {}}}, 2), std::invalid_argument);
}

TEST(RowPlans, WorkedExamples) {
  const Sizes sizes{3, 2};
  EXPECT_EQ(flip_plan(sizes).wanted[0], (std::vector<Segment>{{4, 3, -1}}));
  EXPECT_EQ(roll_plan(sizes, 1).wanted[0], (std::vector<Segment>{{4, 1, 1}, {0, 2, 1}}));
  const Sizes other{1, 4};
  EXPECT_EQ(recut_plan(sizes, other).wanted[1], (std::vector<Segment>{{1, 4, 1}}));
  const Sizes even{3, 3};
  const RowPlan sliced = slice_plan(even, 1, 6, 2);
  EXPECT_EQ(sliced.wanted[0], (std::vector<Segment>{{1, 1, 2}}));
  EXPECT_EQ(sliced.wanted[1], (std::vector<Segment>{{3, 2, 2}}));
  const Sizes wrong{1, 5};
  EXPECT_THROW((void)recut_plan(sizes, wrong), std::invalid_argument);
  EXPECT_THROW((void)slice_plan(sizes, 0, 3, 0), std::invalid_argument);
}

Rows joined(const RowPlan& plan) {
  Rows rows;
  for (const auto& wanted : plan.wanted) {
    const Rows part = expand(wanted);
    rows.insert(rows.end(), part.begin(), part.end());
  }
  return rows;
}

TEST(RowPlans, FlipRollRecutAndSliceGiveTheGlobalResult) {
  Draws draws;
  for (int i = 0; i < 1000; ++i) {
    const Sizes sizes = draws.sizes(draws.in(1, 5), 0, 6);
    const int64_t rows = total_of(sizes);
    const int64_t shift = draws.in(-15, 15);
    Rows flipped;
    Rows rolled;
    for (int64_t row = 0; row < rows; ++row) {
      flipped.push_back(rows - 1 - row);
      rolled.push_back(floor_mod(row - shift, rows));
    }
    EXPECT_EQ(joined(flip_plan(sizes)), flipped);
    EXPECT_EQ(flip_plan(sizes).wanted_sizes(), sizes);
    expect_wanted_rows_arrive(flip_plan(sizes));
    EXPECT_EQ(joined(roll_plan(sizes, shift)), rolled) << join(sizes) << " by " << shift;
    EXPECT_EQ(roll_plan(sizes, shift).wanted_sizes(), sizes);
    expect_wanted_rows_arrive(roll_plan(sizes, shift));
    const Sizes even = balanced_sizes(rows, static_cast<int64_t>(sizes.size()));
    EXPECT_EQ(recut_plan(sizes, even).wanted_sizes(), even);
    expect_wanted_rows_arrive(recut_plan(sizes, even));

    const int64_t start = draws.in(-9, 30);
    const int64_t stop = draws.in(-9, 30);
    const int64_t step = draws.in(1, 4);
    Rows sliced;
    for (int64_t row = std::max<int64_t>(start < 0 ? start + rows : start, 0);
         row < std::min(stop < 0 ? stop + rows : stop, rows); row += step) {
      sliced.push_back(row);
    }
    EXPECT_EQ(joined(slice_plan(sizes, start, stop, step)), sliced);
    EXPECT_EQ(rows_moved(slice_plan(sizes, start, stop, step)), 0);
  }
}

}  // namespace
}  // namespace shardfield::spec
