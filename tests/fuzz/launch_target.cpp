#include <cstdlib>
#include <sstream>

#include <c10/util/Exception.h>

#include "fuzz/targets.h"

#include "shardfield/comm/launch_environment.h"
#include "shardfield/comm/rank_card.h"

namespace shardfield::fuzz {

namespace {

std::string text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

}  // namespace

bool launch_variables(Bytes bytes) {
  std::istringstream lines(text_of(bytes));
  comm::Variables variables;
  for (std::string line; std::getline(lines, line);) {
    const auto equals = line.find('=');
    if (equals != std::string::npos) variables[line.substr(0, equals)] = line.substr(equals + 1);
  }
  try {
    const comm::LaunchEnvironment found = comm::read_launch_environment(variables);
    if (found.rank < 0 || found.rank >= found.world_size || found.local_rank < 0) std::abort();
    if (found.launcher != "SINGLE" && (found.master_port < 1 || found.master_port > 65535))
      std::abort();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

bool rank_card(Bytes bytes) {
  try {
    const comm::RankCard card = comm::card_from_text(text_of(bytes));
    const comm::RankCard again = comm::card_from_text(comm::to_text(card));
    if (again.token != card.token || again.solver_rank != card.solver_rank) std::abort();
    (void)comm::alignment_fault({card, again});
    (void)comm::alignment_table({card, again});
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

}  // namespace shardfield::fuzz
