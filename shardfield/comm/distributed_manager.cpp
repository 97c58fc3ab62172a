#include "shardfield/comm/distributed_manager.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <mutex>
#include <numeric>

#include <ATen/Context.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/gloo.h"
#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

namespace {

constexpr const char* kOp = "DistributedManager";

std::mutex mutex;
// By in-process rank; entries are removed by cleanup() only.
std::map<int, std::unique_ptr<DistributedManager>>& managers() {
  static auto* all = new std::map<int, std::unique_ptr<DistributedManager>>();
  return *all;
}

c10::Device device_for(int local_rank) {
  const int visible = at::hasCUDA() ? at::detail::getCUDAHooks().deviceCount() : 0;
  const int index = device_index(local_rank, visible);
  if (index < 0) return at::kCPU;
  return {at::kCUDA, static_cast<c10::DeviceIndex>(index)};
}

bool is_loopback(const std::string& address) {
  return address.empty() || address == "localhost" || address.starts_with("127.") ||
         address == "::1";
}

std::string this_host(const std::string& master_address) {
  if (is_loopback(master_address)) return "127.0.0.1";
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  return name.data();
}

/// A socket that other hosts cannot reach: torch's own store listens on every address.
int listen_on_loopback(uint16_t port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM, 0);
  const int on = 1;
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  constexpr int kWaiting = 1024;
  const bool listens =
      fd >= 0 && ::setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on)) == 0 &&
      ::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0 &&
      ::listen(fd, kWaiting) == 0;
  const std::string reason = std::strerror(errno);
  if (!listens && fd >= 0) ::close(fd);
  SHARDFIELD_CHECK(listens, kOp, "rank 0 cannot listen on 127.0.0.1:", port, " (", reason,
                   "); pass another port, or set MASTER_PORT");
  return fd;
}

c10::intrusive_ptr<c10d::Store> make_store(const LaunchEnvironment& launch,
                                           const ManagerOptions& options) {
  if (launch.world_size == 1) return c10::make_intrusive<c10d::HashStore>();
  c10d::TCPStoreOptions store;
  store.port = static_cast<uint16_t>(launch.master_port);
  const bool agent = launch.agent_restarts >= 0;
  store.isServer = launch.rank == 0 && !agent;
  store.numWorkers = static_cast<size_t>(launch.world_size);
  store.waitWorkers = true;
  store.timeout = options.timeout;
  if (store.isServer && store.port != 0 && is_loopback(launch.master_address))
    store.masterListenFd = listen_on_loopback(store.port);
  auto made = c10::make_intrusive<c10d::TCPStore>(launch.master_address, store);
  if (!agent) return made;
  // The agent's store outlives a restart, and with it the dead ranks' addresses.
  return c10::make_intrusive<c10d::PrefixStore>("attempt_" + std::to_string(launch.agent_restarts),
                                                std::move(made));
}

void check_new(const auto& groups, const std::string& name) {
  SHARDFIELD_CHECK(!groups.contains(name), kOp, "the group '", name,
                   "' exists already; choose another name");
}

}  // namespace

DistributedManager::DistributedManager(LaunchEnvironment launch, ManagerOptions options)
    : launch_(std::move(launch)),
      options_(std::move(options)),
      device_(device_for(launch_.local_rank)) {
  SHARDFIELD_CHECK(launch_.rank >= 0 && launch_.rank < launch_.world_size, kOp,
                   "expected a rank in [0, ", launch_.world_size, "), got ", launch_.rank);
  store_ = make_store(launch_, options_);
  std::vector<int> world(static_cast<size_t>(launch_.world_size));
  std::iota(world.begin(), world.end(), 0);
  add("world", {world}, {});
}

DistributedManager& DistributedManager::initialize(const ManagerOptions& options) {
  return initialize(read_launch_environment(launch_variables()), options);
}

DistributedManager& DistributedManager::initialize(const LaunchEnvironment& values,
                                                   const ManagerOptions& options) {
  SHARDFIELD_CHECK(!is_initialized(), kOp, "already initialized; call cleanup() first");
  std::unique_ptr<DistributedManager> made(new DistributedManager(values, options));
  const std::lock_guard<std::mutex> lock(mutex);
  return *(managers()[current_context()] = std::move(made));
}

bool DistributedManager::is_initialized() {
  const std::lock_guard<std::mutex> lock(mutex);
  return managers().contains(current_context());
}

DistributedManager& DistributedManager::instance() {
  const std::lock_guard<std::mutex> lock(mutex);
  const auto it = managers().find(current_context());
  SHARDFIELD_CHECK(it != managers().end(), kOp, "not initialized; call initialize() first");
  return *it->second;
}

void DistributedManager::cleanup(bool barrier) {
  if (!is_initialized()) return;
  if (barrier && instance().world_size() > 1) {
    const spec::Mesh* world = make_mesh(instance().group());
    const auto released = c10::make_scope_exit([world] { release_groups(*world); });
    all_gather_ints({0}, *world, at::kCPU);
  }
  std::unique_ptr<DistributedManager> gone;
  for (const auto& [name, mesh] : instance().meshes_) release_groups(*mesh);
  const std::lock_guard<std::mutex> lock(mutex);
  std::swap(gone, managers()[current_context()]);
  managers().erase(current_context());
}

DistributedManager::Backend DistributedManager::make_backend(const std::string& name,
                                                             const std::vector<int>& ranks) {
  const auto prefix = "group/" + name + "/from" + std::to_string(ranks.front());
  const auto store = c10::make_intrusive<c10d::PrefixStore>(prefix, store_);
  const auto place = std::find(ranks.begin(), ranks.end(), rank()) - ranks.begin();
  const int size = static_cast<int>(ranks.size());
  if (options_.backend) return options_.backend(store, static_cast<int>(place), size);
  return make_gloo_on(this_host(launch_.master_address), store, static_cast<int>(place), size,
                      options_.timeout);
}

void DistributedManager::add(const std::string& name, const spec::Partition& groups,
                             const spec::Partition& within) {
  check_new(groups_, name);
  Entry made;
  made.all = groups;
  made.within = within;
  for (const auto& ranks : groups)
    if (std::find(ranks.begin(), ranks.end(), rank()) != ranks.end()) made.ranks = ranks;
  made.backend = make_backend(name, made.ranks);
  groups_.emplace(name, std::move(made));
}

const DistributedManager::Entry& DistributedManager::entry(const std::string& name) const {
  const auto it = groups_.find(name);
  std::string known;
  for (const auto& [other, unused] : groups_) known += (known.empty() ? "" : ", ") + other;
  SHARDFIELD_CHECK(it != groups_.end(), kOp, "no group '", name, "'; known are ", known);
  return it->second;
}

const DistributedManager::Backend& DistributedManager::group(const std::string& name) const {
  return entry(name).backend;
}

const std::vector<int>& DistributedManager::ranks(const std::string& name) const {
  return entry(name).ranks;
}

std::vector<std::string> DistributedManager::group_names() const {
  std::vector<std::string> names;
  for (const auto& [name, unused] : groups_) names.push_back(name);
  return names;
}

void DistributedManager::create_process_subgroup(const std::string& name, int64_t size,
                                                 const std::string& within) {
  const spec::Partition& enclosing = entry(within).all;
  add(name, spec::consecutive_groups(enclosing, size, name), enclosing);
}

void DistributedManager::create_orthogonal_process_group(const std::string& orthogonal_name,
                                                         const std::string& name) {
  const Entry& blocks = entry(name);
  SHARDFIELD_CHECK(!blocks.within.empty(), kOp, "'", name,
                   "' is the world; nothing is "
                   "orthogonal to it");
  add(orthogonal_name, spec::orthogonal_groups(blocks.within, blocks.all), blocks.within);
}

void DistributedManager::create_groups(std::vector<spec::GroupNode> tree, bool first_is_innermost) {
  const auto plan = spec::plan_groups(std::move(tree), world_size(), first_is_innermost);
  // Before the first one is made: what was made on the way could not be made again.
  for (const auto& [name, groups, within] : plan) check_new(groups_, name);
  for (const auto& [name, groups, within] : plan) add(name, groups, within);
}

const spec::Mesh* DistributedManager::initialize_mesh(std::vector<int64_t> shape,
                                                      std::vector<std::string> axis_names,
                                                      const std::string& name) {
  SHARDFIELD_CHECK(!shape.empty() && shape.size() == axis_names.size(), kOp,
                   "expected one name per mesh axis, got ", axis_names.size(), " for ",
                   shape.size(), " axes");
  SHARDFIELD_CHECK(!meshes_.contains(name), kOp, "the mesh '", name, "' exists already");
  std::vector<spec::GroupNode> tree = {{"world", world_size(), -1}};
  for (size_t a = 0; a < shape.size(); ++a)
    tree.push_back({axis_names[a], std::max<int64_t>(shape[a], 0), 0});
  create_groups(tree, /*first_is_innermost=*/false);
  std::vector<Group> axes;
  for (size_t a = 0; a < shape.size(); ++a) {
    shape[a] = group_size(axis_names[a]);
    axes.push_back({group(axis_names[a])});
  }
  return meshes_[name] = make_mesh(shape, axis_names, rank(), {group("world")}, axes);
}

const spec::Mesh* DistributedManager::mesh(const std::string& name) const {
  const auto it = meshes_.find(name);
  std::string known;
  for (const auto& [other, unused] : meshes_) known += (known.empty() ? "" : ", ") + other;
  SHARDFIELD_CHECK(it != meshes_.end(), kOp, "no mesh '", name, "'; known are ",
                   known.empty() ? "none" : known);
  return it->second;
}

}  // namespace shardfield::comm
