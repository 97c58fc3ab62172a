#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardfield::comm {

/// One process as its solver, torch and the machine see it.
struct RankCard {
  int solver_rank = 0;
  int solver_size = 1;
  int torch_rank = 0;
  int torch_size = 1;
  std::string host;
  int64_t pid = 0;
  std::string device;    ///< "cpu", "cuda:0"
  std::string gpu;       ///< the accelerator's own id; empty on a CPU
  std::string launcher;  ///< what the launcher's variables say: "OPENMPI 1/4"
  int64_t token = 0;     ///< a number of this process's own, for the ring
};

/// "host=a\tpid=3..." and back: how a card travels. Local.
std::string to_text(const RankCard& card);
/// @throws c10::Error when the text is no card.
RankCard card_from_text(const std::string& text);

/// One line per process. Local.
std::string alignment_table(const std::vector<RankCard>& cards);

/// What is wrong with the cards of all processes of one solver, in any order; empty when torch's
/// ranks are the solver's. Where the solver has all of torch's ranks the numbers must be equal; a
/// solver on some of them must number them in torch's order. Local and pure: every process that
/// passes the same cards gets the same answer.
std::string alignment_fault(const std::vector<RankCard>& cards);

}  // namespace shardfield::comm
