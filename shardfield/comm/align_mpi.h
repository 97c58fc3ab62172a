#pragma once

/// For programs that use MPI. Nothing in the library includes this, so that MPI is needed by these
/// programs alone.

#include <array>
#include <string>
#include <vector>

#if !__has_include(<mpi.h>)
#error "shardfield/comm/align_mpi.h needs MPI (mpi.h); without it include rank_alignment.h"
#endif
#include <mpi.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/distributed_manager.h"
#include "shardfield/comm/rank_alignment.h"

namespace shardfield::comm {

/// A port that is free on this host now. Local.
inline int free_port() {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t length = sizeof(address);
  const bool bound = socket >= 0 &&
                     ::bind(socket, reinterpret_cast<sockaddr*>(&address), length) == 0 &&
                     ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length) == 0;
  if (socket >= 0) ::close(socket);
  SHARDFIELD_CHECK(bound, "align_communicators", "no free port on this host");
  return ntohs(address.sin_port);
}

/// The solver's rank and size, the rank on this host, and a place for rank 0's store. Collective
/// over the communicator.
inline LaunchEnvironment launch_from_mpi(MPI_Comm solver) {
  LaunchEnvironment out;
  out.launcher = "SOLVER";
  MPI_Comm_rank(solver, &out.rank);
  MPI_Comm_size(solver, &out.world_size);
  MPI_Comm host = MPI_COMM_NULL;
  MPI_Comm_split_type(solver, MPI_COMM_TYPE_SHARED, out.rank, MPI_INFO_NULL, &host);
  int on_host = 0;
  MPI_Comm_rank(host, &out.local_rank);
  MPI_Comm_size(host, &on_host);
  MPI_Comm_free(&host);
  int fewest = 0;
  MPI_Allreduce(&on_host, &fewest, 1, MPI_INT, MPI_MIN, solver);
  std::array<char, 256> name{};
  ::gethostname(name.data(), name.size() - 1);
  MPI_Bcast(name.data(), static_cast<int>(name.size()), MPI_CHAR, 0, solver);
  out.master_address = fewest == out.world_size ? "127.0.0.1" : name.data();
  if (out.rank == 0) out.master_port = free_port();
  MPI_Bcast(&out.master_port, 1, MPI_INT, 0, solver);
  return out;
}

/// Makes torch's ranks the solver's: starts the manager with MPI's numbers where it is not started,
/// compares ranks, sizes, order and devices, and passes a token both ways through MPI and through
/// torch. Collective over the communicator.
/// @return the manager
/// @throws c10::Error on every rank, with the table of ranks.
inline DistributedManager& align_communicators(MPI_Comm solver,
                                               const ManagerOptions& options = {}) {
  if (!DistributedManager::is_initialized())
    DistributedManager::initialize(launch_from_mpi(solver), options);
  DistributedManager& manager = DistributedManager::instance();
  int rank = 0, size = 1;
  MPI_Comm_rank(solver, &rank);
  MPI_Comm_size(solver, &size);
  const std::vector<RankCard> cards = align_communicators(rank, size, manager);
  for (const int step : {1, size - 1}) {
    const int from = (rank + size - step) % size;
    int64_t token = cards[rank].token, got = 0;
    MPI_Sendrecv(&token, 1, MPI_INT64_T, (rank + step) % size, step, &got, 1, MPI_INT64_T, from,
                 step, solver, MPI_STATUS_IGNORE);
    SHARDFIELD_CHECK(size == 1 || got == cards[from].token, "align_communicators", "rank ", rank,
                     " got a token through MPI that is not rank ", from,
                     "'s. The ranks:", alignment_table(cards));
  }
  return manager;
}

}  // namespace shardfield::comm
