#include "shardfield/exchange/block_ring.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/comm/in_process.h"

namespace shardfield::exchange {
namespace {

constexpr auto kTimeout = std::chrono::seconds(20);
using Needed = std::vector<std::vector<bool>>;

/// Each block is three numbers that name its owner; every rank adds up those it needs, and sends
/// its own number to their owners.
void go_round(const Needed& needed, BlockRing::Direction direction) {
  comm::run_in_process(
      {static_cast<int64_t>(needed.size())},
      [&](const spec::Mesh& mesh) {
        const int ranks = mesh.size(), rank = mesh.rank;
        std::vector<int> order(ranks);
        for (int i = 0; i < ranks; ++i) order[i] = ranks - 1 - i;
        const BlockRing ring(mesh, order, needed, direction);
        const int own = ranks - 1 - rank;
        const auto named = [](int i) { return at::full({3}, double(i), at::kDouble); };
        std::vector<at::Tensor> held{named(own)};
        double seen = 0, told = 0;
        for (int step = 0; step < ranks; ++step) {
          std::vector<at::Tensor> next;
          if (step + 1 < ranks && ring.holds(step + 1)) next = {at::empty({3}, at::kDouble)};
          auto passing = step + 1 < ranks ? ring.pass_on(step, held, next) : comm::Exchange();
          const int block = ring.block_at(step);
          std::vector<at::Tensor> parts, received;
          if (ring.uses(step)) {
            EXPECT_TRUE(at::equal(held.at(0), named(block)));
            seen += block;
            parts = {named(own)};
          }
          if (step > 0 && ring.is_used_after(step)) received = {at::empty({3}, at::kDouble)};
          if (step > 0) ring.to_owner(step, parts, received).wait();
          if (!received.empty()) told += received[0][0].item<double>();
          passing.wait();
          held = next;
        }
        double blocks = 0, users = 0;
        for (int i = 0; i < ranks; ++i) {
          blocks += needed[own][i] ? i : 0;
          users += i != own && needed[i][own] ? i : 0;
        }
        EXPECT_EQ(seen, blocks);
        EXPECT_EQ(told, users);
      },
      kTimeout);
}

void go_round(const Needed& needed) {
  go_round(needed, BlockRing::Direction::kUp);
  go_round(needed, BlockRing::Direction::kDown);
}

TEST(BlockRing, BlocksReachWhoNeedsThem) {
  go_round({{true}});
  go_round({{true, true}, {true, true}});
  go_round({{true, false, false}, {true, true, false}, {true, true, true}});  // causal
  go_round({{false, true, false}, {false, false, false}, {false, true, true}});
  go_round({{true, false, false, true},
            {false, false, false, false},
            {false, true, true, false},
            {true, true, false, true}});
}

TEST(BlockRing, ABlockStopsWhereNobodyNeedsIt) {
  comm::run_in_process(
      {3},
      [](const spec::Mesh& mesh) {
        const BlockRing ring(mesh, {0, 1, 2},
                             {{true, false, false}, {true, true, false}, {true, true, true}});
        const BlockRing down(mesh, {0, 1, 2},
                             {{true, true, true}, {false, true, true}, {false, false, true}},
                             BlockRing::Direction::kDown);
        for (int step = 0; step < 3; ++step) {
          EXPECT_EQ(ring.holds(step), step <= mesh.rank);
          EXPECT_EQ(down.holds(step), step <= 2 - mesh.rank);
        }
      },
      kTimeout);
}

}  // namespace
}  // namespace shardfield::exchange
