#include "shardfield/comm/rank_alignment.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include "shardfield/comm/in_process.h"

namespace shardfield::comm {
namespace {

constexpr auto kTimeout = std::chrono::seconds(20);

RankCard card(int solver_rank, int solver_size, int torch_rank, int torch_size) {
  RankCard made;
  made.solver_rank = solver_rank;
  made.solver_size = solver_size;
  made.torch_rank = torch_rank;
  made.torch_size = torch_size;
  made.host = "node1";
  made.device = "cpu";
  return made;
}

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

TEST(RankAlignment, EqualRanksAreFine) {
  EXPECT_EQ(alignment_fault({card(1, 2, 1, 2), card(0, 2, 0, 2)}), "");
  // A solver on ranks 1 and 3 of four.
  EXPECT_EQ(alignment_fault({card(0, 2, 1, 4), card(1, 2, 3, 4)}), "");
}

TEST(RankAlignment, FaultsAreNamed) {  // case K7
  EXPECT_TRUE(
      says(alignment_fault({card(0, 2, 1, 2), card(1, 2, 0, 2)}), "solver rank 0 is torch rank 1"));
  EXPECT_TRUE(says(alignment_fault({card(0, 2, 0, 2), card(1, 3, 1, 2)}), "says 3"));
  EXPECT_TRUE(says(alignment_fault({card(0, 2, 0, 2), card(0, 2, 1, 2)}), "each once"));
  EXPECT_TRUE(says(alignment_fault({card(0, 2, 3, 4), card(1, 2, 1, 4)}), "in another order"));
  std::vector<RankCard> shared = {card(0, 2, 0, 2), card(1, 2, 1, 2)};
  shared[0].gpu = shared[1].gpu = "GPU-7";
  EXPECT_TRUE(says(alignment_fault(shared), "ranks 0 and 1 use one accelerator (GPU-7 on node1)"));
  shared[1].host = "node2";
  EXPECT_EQ(alignment_fault(shared), "");
}

TEST(RankAlignment, CardsSurviveTheirTrip) {
  RankCard made = card(2, 4, 3, 8);
  made.launcher = "OPENMPI 2/4\tand a tab";
  made.token = -5;
  const RankCard back = card_from_text(to_text(made));
  EXPECT_EQ(back.solver_rank, 2);
  EXPECT_EQ(back.torch_size, 8);
  EXPECT_EQ(back.launcher, "OPENMPI 2/4 and a tab");
  EXPECT_EQ(back.token, -5);
  EXPECT_THROW(card_from_text("1\t2"), c10::Error);
}

/// A job of three ranks that aligns rightly, then wrongly, and leaves.
void align_rightly_and_wrongly(int port) {
  run_in_process(
      {3},
      [&](const spec::Mesh& mesh) {
        ManagerOptions options;
        options.timeout = kTimeout;
        auto& manager = DistributedManager::initialize(
            {"EXPLICIT", mesh.rank, 3, mesh.rank, "127.0.0.1", port}, options);
        const auto cards = align_communicators(mesh.rank, 3, manager);
        EXPECT_EQ(cards.size(), 3U);
        EXPECT_EQ(cards[2].launcher, "EXPLICIT 2/3");
        try {
          align_communicators(2 - mesh.rank, 3, manager);
          ADD_FAILURE() << "no error";
        } catch (const c10::Error& error) {
          const std::string text = error.what();
          EXPECT_TRUE(says(text, "solver rank 0 is torch rank 2"));
          EXPECT_TRUE(says(text, "solver 2/3, torch 0/3"));
        }
        DistributedManager::cleanup();
      },
      kTimeout);
}

TEST(RankAlignment, EveryRankGetsTheSameAnswer) {
  const int port = 20000 + (static_cast<int>(::getpid()) + 7) % 12000;
  align_rightly_and_wrongly(port);
  align_rightly_and_wrongly(port);  // a refused alignment gives the port back too
}

}  // namespace
}  // namespace shardfield::comm
