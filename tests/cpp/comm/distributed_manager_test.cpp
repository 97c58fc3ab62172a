#include "shardfield/comm/distributed_manager.h"

#include <fstream>
#include <iomanip>
#include <set>
#include <sstream>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

#include <unistd.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/comm/in_process.h"

namespace shardfield::comm {
namespace {

constexpr auto kTimeout = std::chrono::seconds(20);

int port_of_this_process() {
  return 20000 + static_cast<int>(::getpid()) % 12000;
}

/// Every rank thread joins a job of its own store on loopback, then runs `body`.
void with_manager(int ranks, const std::function<void(DistributedManager&)>& body) {
  const int port = port_of_this_process();
  run_in_process(
      {ranks},
      [&](const spec::Mesh& mesh) {
        ManagerOptions options;
        options.timeout = kTimeout;
        body(DistributedManager::initialize(
            {"EXPLICIT", mesh.rank, ranks, mesh.rank, "127.0.0.1", port}, options));
        // Rank 0 holds the store: it leaves last.
        DistributedManager::cleanup(/*barrier=*/true);
        EXPECT_FALSE(DistributedManager::is_initialized());
      },
      kTimeout);
}

TEST(DistributedManager, GroupsOfATreeAndTheirOrthogonalOnes) {
  with_manager(4, [](DistributedManager& manager) {
    const int rank = manager.rank();
    manager.create_groups({{"world"}, {"domain", 2, 0}, {"data", 0, 0}});
    EXPECT_EQ(manager.group_size("data"), 2);
    EXPECT_EQ(manager.group_rank("domain"), rank % 2);
    EXPECT_EQ(manager.ranks("data"), (std::vector<int>{rank % 2, rank % 2 + 2}));
    manager.create_process_subgroup("pair", 2);
    manager.create_orthogonal_process_group("across", "pair");
    EXPECT_EQ(manager.ranks("across"), manager.ranks("data"));
    EXPECT_THROW(manager.create_process_subgroup("pair", 2), c10::Error);
    EXPECT_THROW(manager.create_groups({{"world"}, {"fresh", 2, 0}, {"pair", 2, 0}}), c10::Error);
    EXPECT_THROW(manager.group("fresh"), c10::Error) << "made half";
    try {
      manager.group("nobody");
      ADD_FAILURE() << "no error";
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find("known are across, data, domain, pair, world"),
                std::string::npos);
    }
  });
}

TEST(DistributedManager, AMeshThatComputes) {  // case K5
  with_manager(4, [](DistributedManager& manager) {
    const spec::Mesh* mesh = manager.initialize_mesh({-1, 2}, {"data", "domain"});
    EXPECT_EQ(mesh, manager.mesh());
    EXPECT_EQ(mesh->shape, (std::vector<int64_t>{2, 2}));
    const at::Tensor mine = at::full({1}, manager.rank(), at::kLong);
    EXPECT_EQ(all_reduce(mine, *mesh, {1}).item<int64_t>(), manager.rank() < 2 ? 1 : 5);
    EXPECT_EQ(all_reduce(mine, *mesh, {0}).item<int64_t>(), manager.rank() % 2 ? 4 : 2);
    EXPECT_THROW(manager.mesh("other"), c10::Error);
  });
}

/// Addresses that something listens on at a port, as /proc/net writes them.
std::set<std::string> listening(int port) {
  std::set<std::string> found;
  std::ostringstream wanted;
  wanted << ':' << std::uppercase << std::hex << std::setw(4) << std::setfill('0') << port;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    std::string slot, local, remote, state;
    for (std::string line; std::getline(lines, line);)
      if (std::istringstream(line) >> slot >> local >> remote >> state && state == "0A" &&
          local.ends_with(wanted.str()))
        found.insert(local.substr(0, local.find(':')));
  }
  return found;
}

TEST(DistributedManager, TheStoreListensOnLoopbackAlone) {
  with_manager(2, [](DistributedManager& manager) {
    EXPECT_EQ(listening(port_of_this_process()), std::set<std::string>{"0100007F"})
        << "on rank " << manager.rank();
    const spec::Mesh* mesh = manager.initialize_mesh({2}, {"domain"});
    (void)all_reduce(at::ones({1}), *mesh, {0});  // nobody leaves before all have looked
  });
}

TEST(DistributedManager, OneProcessNeedsNoLauncher) {
  EXPECT_THROW(DistributedManager::instance(), c10::Error);
  DistributedManager& manager = DistributedManager::initialize({"SINGLE", 0, 1, 0, "", 0});
  EXPECT_EQ(manager.group_size(), 1);
  EXPECT_THROW(DistributedManager::initialize(), c10::Error);
  DistributedManager::cleanup();
}

}  // namespace
}  // namespace shardfield::comm
