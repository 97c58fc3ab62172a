// What one rank of a launcher does: joins, gathers uneven rows, leaves. Its exit code is the
// answer.
//
//   launched_rank LAUNCHER RANKS [--killed-once]
//
// With --killed-once rank 1 is killed at the first start, after the ranks have met: torchrun must
// start all of them anew.

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/distributed_manager.h"
#include "shardfield/comm/vector_collectives.h"

namespace {

namespace comm = shardfield::comm;

void join_and_gather(const std::string& launcher, int ranks, bool killed_once) {
  comm::ManagerOptions options;
  options.timeout = std::chrono::seconds(20);
  auto& manager = comm::DistributedManager::initialize(options);
  SHARDFIELD_CHECK(manager.launcher() == launcher && manager.world_size() == ranks, "launched_rank",
                   "expected ", ranks, " ranks of ", launcher, ", got ", manager.world_size(),
                   " of ", manager.launcher());
  const auto* mesh = manager.initialize_mesh({-1}, {"domain"});
  const char* restarts = std::getenv("TORCHELASTIC_RESTART_COUNT");
  if (killed_once && manager.rank() == 1 && restarts && std::string(restarts) == "0")
    std::raise(SIGKILL);
  std::vector<int64_t> sizes;
  double want = 0;
  for (int r = 0; r < ranks; ++r) {
    sizes.push_back(r + 1);
    want += r * (r + 1);
  }
  const at::Tensor rows = at::full({manager.rank() + 1}, static_cast<double>(manager.rank()));
  const double got = comm::all_gather_v(rows, *mesh, sizes, 0).sum().item<double>();
  SHARDFIELD_CHECK(got == want, "launched_rank", "expected the sum ", want, ", got ", got);
  comm::DistributedManager::cleanup(/*barrier=*/true);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  if (arguments.size() < 2) {
    std::cerr << "launched_rank LAUNCHER RANKS [--killed-once]\n";
    return 2;
  }
  try {
    join_and_gather(arguments[0], std::stoi(arguments[1]), arguments.size() > 2);
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
  return 0;
}
