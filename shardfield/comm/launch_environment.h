#pragma once

#include <map>
#include <string>

namespace shardfield::comm {

/// Environment variables by name.
using Variables = std::map<std::string, std::string>;

/// What one launcher says about this process.
struct LaunchEnvironment {
  std::string launcher;  ///< "ENV", "SLURM", "OPENMPI", "MPICH" or "SINGLE"
  int rank = 0;
  int world_size = 1;
  int local_rank = 0;          ///< rank among the processes of this host
  std::string master_address;  ///< host of rank 0; empty for SINGLE
  int master_port = 0;         ///< port of rank 0's store; 0 for SINGLE
  /// How often torchrun's agent, which keeps the store itself, has restarted the job; -1 without
  /// one.
  int agent_restarts = -1;

  bool operator==(const LaunchEnvironment&) const = default;
};

/// The variable that chooses the launcher by hand: ENV, SLURM, OPENMPI, MPICH or SINGLE.
inline constexpr const char* kLauncherVariable = "SHARDFIELD_DISTRIBUTED_INITIALIZATION_METHOD";

/// The variables of this process that launchers set. Local.
Variables launch_variables();

/// Reads rank, sizes and rendezvous from the variables of a launcher. Pure.
///
/// Order: `method` (or kLauncherVariable when empty), then torchrun's RANK/WORLD_SIZE, SLURM,
/// Open MPI, MPICH, and one single process when none has set anything. The rendezvous is
/// MASTER_ADDR and MASTER_PORT where set. Otherwise the host comes from SLURM_LAUNCH_NODE_IPADDR or
/// the first host of SLURM's node list, is 127.0.0.1 for MPI ranks that share one host, and
/// the port is derived from the job's identity (SLURM_JOB_ID, PMIX_NAMESPACE) or 12355.
///
/// @throws c10::Error naming the variables found when a launcher's set is incomplete or no number,
/// when a rank is out of range, or when two launchers disagree about rank or size (RANK exported
/// by hand under mpirun; SLURM against mpirun). Ranks of torchrun's own agent are trusted.
LaunchEnvironment read_launch_environment(const Variables& variables,
                                          const std::string& method = {});

/// Which of `visible` accelerators of a host a local rank takes: local rank 3 of 2 takes 1; -1
/// stands for the CPU of a host without any. Pure.
int device_index(int local_rank, int visible);

/// First host of a SLURM node list: "gpu[007-012,020],login1" gives "gpu007". Pure.
std::string first_host(const std::string& node_list);

}  // namespace shardfield::comm
