#pragma once

#include <chrono>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include <c10/core/Device.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "shardfield/comm/launch_environment.h"
#include "shardfield/spec/mesh.h"
#include "shardfield/spec/rank_groups.h"

namespace shardfield::comm {

/// Makes one group's backend; e.g. NCCL's. Collective over the group's ranks.
using BackendFactory = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, int rank, int size)>;

struct ManagerOptions {
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  BackendFactory backend;  ///< default: Gloo, over loopback when all ranks share this host
};

/// Rank, device, named groups and meshes of a C++ program: one per process (one per in-process
/// rank). Start with initialize(), end with cleanup().
class DistributedManager {
 public:
  using Backend = c10::intrusive_ptr<c10d::Backend>;

  /// Reads the launcher's variables (launch_environment.h) and joins the world group. Collective
  /// over the job. @throws c10::Error when already initialized or the variables do not fit.
  static DistributedManager& initialize(const ManagerOptions& options = {});
  /// The same with explicit values.
  static DistributedManager& initialize(const LaunchEnvironment& values,
                                        const ManagerOptions& options = {});
  static bool is_initialized();
  /// @throws c10::Error before initialize().
  static DistributedManager& instance();
  /// Drops all groups; meshes made from them answer with an error. Local, unless `barrier`.
  static void cleanup(bool barrier = false);

  int rank() const { return launch_.rank; }
  int world_size() const { return launch_.world_size; }
  int local_rank() const { return launch_.local_rank; }
  const std::string& launcher() const { return launch_.launcher; }
  /// cuda:(local rank modulo visible devices), or cpu on a host without any.
  c10::Device device() const { return device_; }

  /// This rank's group of that name ("world" is all ranks). @throws c10::Error listing the names.
  const Backend& group(const std::string& name = "world") const;
  int group_rank(const std::string& name = "world") const { return group(name)->getRank(); }
  int group_size(const std::string& name = "world") const { return group(name)->getSize(); }
  std::vector<std::string> group_names() const;
  /// Global ranks of this rank's group, in group order.
  const std::vector<int>& ranks(const std::string& name) const;

  /// Blocks of `size` consecutive ranks of every group `within`. Collective over the job.
  void create_process_subgroup(const std::string& name, int64_t size,
                               const std::string& within = "world");
  /// The groups across the blocks `name`, inside their enclosing group. Collective over the job.
  void create_orthogonal_process_group(const std::string& orthogonal_name, const std::string& name);
  /// All groups of a tree (rank_groups.h) in one call. Collective over the job.
  void create_groups(std::vector<spec::GroupNode> tree, bool first_is_innermost = true);

  /// A mesh over all ranks, row-major, whose axes also become groups. Collective over the job.
  /// @param shape  ranks per axis; one may be -1
  const spec::Mesh* initialize_mesh(std::vector<int64_t> shape, std::vector<std::string> axis_names,
                                    const std::string& name = "global");
  const spec::Mesh* mesh(const std::string& name = "global") const;

 private:
  struct Entry {
    Backend backend;
    std::vector<int> ranks;
    spec::Partition all;     ///< the groups of this name over the whole job
    spec::Partition within;  ///< the groups that these cut into blocks; empty for the world
  };

  DistributedManager(LaunchEnvironment launch, ManagerOptions options);
  Backend make_backend(const std::string& name, const std::vector<int>& ranks);
  void add(const std::string& name, const spec::Partition& groups, const spec::Partition& within);
  const Entry& entry(const std::string& name) const;

  LaunchEnvironment launch_;
  ManagerOptions options_;
  c10::Device device_;
  c10::intrusive_ptr<c10d::Store> store_;
  std::map<std::string, Entry> groups_;
  std::map<std::string, const spec::Mesh*> meshes_;
};

}  // namespace shardfield::comm
