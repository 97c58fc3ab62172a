#include "shardfield/comm/launch_environment.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <vector>

#include "shardfield/base/error.h"

// POSIX; declared by no header of the standard library.
extern char** environ;  // NOLINT(readability-identifier-naming)

namespace shardfield::comm {

namespace {

constexpr const char* kOp = "DistributedManager";
constexpr int kDefaultPort = 12355;

const std::vector<std::string> kPrefixes = {
    "RANK",       "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "TORCHELASTIC_",
    "OMPI_COMM_", "PMIX_",      "PMI_",       "MPI_LOCAL",        "SLURM_",  kLauncherVariable,
};

/// Names of one launcher's variables.
struct Names {
  const char* launcher;
  const char* rank;
  std::vector<const char*> world_size;
  std::vector<const char*> local_rank;
};

const std::vector<Names>& launchers() {
  static const std::vector<Names> all = {
      {"ENV", "RANK", {"WORLD_SIZE"}, {"LOCAL_RANK"}},
      {"SLURM", "SLURM_PROCID", {"SLURM_NTASKS", "SLURM_NPROCS"}, {"SLURM_LOCALID"}},
      {"OPENMPI", "OMPI_COMM_WORLD_RANK", {"OMPI_COMM_WORLD_SIZE"}, {"OMPI_COMM_WORLD_LOCAL_RANK"}},
      {"MPICH", "PMI_RANK", {"PMI_SIZE"}, {"MPI_LOCALRANKID", "PMI_LOCAL_RANK"}},
  };
  return all;
}

const std::string* find(const Variables& variables, const std::string& name) {
  const auto it = variables.find(name);
  return it == variables.end() || it->second.empty() ? nullptr : &it->second;
}

/// "RANK=0, MASTER_ADDR=n1" or "none of them".
std::string listed(const Variables& variables) {
  std::string text;
  for (const auto& [name, value] : variables)
    if (!name.starts_with("SLURM_") || name == "SLURM_PROCID" || name == "SLURM_NTASKS" ||
        name == "SLURM_NPROCS" || name == "SLURM_LOCALID" || name == "SLURM_JOB_NODELIST" ||
        name == "SLURM_LAUNCH_NODE_IPADDR")
      text.append(text.empty() ? "" : ", ").append(name).append("=").append(value);
  return text.empty() ? "no launcher variable" : text;
}

int number(const Variables& variables, const std::string& name) {
  const std::string& text = *find(variables, name);
  int value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  SHARDFIELD_CHECK(error == std::errc() && end == text.data() + text.size() && value >= 0, kOp,
                   "expected a whole number in ", name, ", got '", text, "'; found ",
                   listed(variables));
  return value;
}

std::optional<int> first_number(const Variables& variables, const std::vector<const char*>& names) {
  for (const char* name : names)
    if (find(variables, name)) return number(variables, name);
  return std::nullopt;
}

std::string joined(const std::vector<const char*>& names) {
  std::string text;
  for (const char* name : names) text += (text.empty() ? "" : " or ") + std::string(name);
  return text;
}

/// True when a launcher has set anything that only it sets.
bool started_by(const Variables& variables, const Names& names) {
  if (find(variables, names.rank)) return true;
  // SLURM_NTASKS stands in the batch script's environment too, where there is one process.
  if (names.launcher == std::string("SLURM")) return false;
  return first_number(variables, names.world_size).has_value();
}

/// Rank and sizes, checked.
LaunchEnvironment read_ranks(const Variables& variables, const Names& names) {
  LaunchEnvironment out;
  out.launcher = names.launcher;
  const auto world_size = first_number(variables, names.world_size);
  SHARDFIELD_CHECK(find(variables, names.rank) && world_size, kOp, "expected ", names.rank, " and ",
                   joined(names.world_size), " from the launcher ", names.launcher, ", found ",
                   listed(variables), "; start with the launcher, set what is missing, or set ",
                   kLauncherVariable, "=SINGLE for one process");
  out.rank = number(variables, names.rank);
  out.world_size = *world_size;
  SHARDFIELD_CHECK(out.rank < out.world_size, kOp, "expected ", names.rank, " below ",
                   joined(names.world_size), "=", out.world_size, ", got ", out.rank, "; found ",
                   listed(variables));
  out.local_rank = first_number(variables, names.local_rank).value_or(-1);
  return out;
}

/// A port in [20000, 32000) that all ranks of one job derive alike (FNV-1a); from 32768 on the
/// system gives ports to whoever connects.
int port_of(const std::string& job) {
  uint32_t hash = 2166136261U;
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619U;
  return 20000 + static_cast<int>(hash % 12000U);
}

std::string slurm_address(const Variables& variables) {
  if (const auto* address = find(variables, "SLURM_LAUNCH_NODE_IPADDR")) return *address;
  for (const char* name : {"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"})
    if (const auto* list = find(variables, name)) return first_host(*list);
  SHARDFIELD_CHECK(false, kOp,
                   "expected one of MASTER_ADDR, SLURM_LAUNCH_NODE_IPADDR and SLURM_JOB_NODELIST "
                   "under SLURM, found ",
                   listed(variables), "; export MASTER_ADDR=<host of rank 0>");
}

void check_one_host(const Variables& variables, const LaunchEnvironment& ranks) {
  const auto on_this_host =
      first_number(variables, {"OMPI_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS", "PMI_LOCAL_SIZE"});
  SHARDFIELD_CHECK(on_this_host.value_or(ranks.world_size) == ranks.world_size, kOp, "the ",
                   ranks.world_size, " MPI ranks span several hosts (", *on_this_host,
                   " on this one), so rank 0's host must be given; export MASTER_ADDR=<host of "
                   "rank 0> (mpirun -x MASTER_ADDR=...); found ",
                   listed(variables));
}

void read_rendezvous(const Variables& variables, LaunchEnvironment& out) {
  const auto* address = find(variables, "MASTER_ADDR");
  const bool has_port = find(variables, "MASTER_PORT") != nullptr;
  if (out.launcher == "ENV") {
    SHARDFIELD_CHECK(address && has_port, kOp,
                     "expected MASTER_ADDR and MASTER_PORT beside RANK and WORLD_SIZE, found ",
                     listed(variables), "; start with torchrun or export both");
    const auto* agent = find(variables, "TORCHELASTIC_USE_AGENT_STORE");
    if (agent && *agent == "True")
      out.agent_restarts = first_number(variables, {"TORCHELASTIC_RESTART_COUNT"}).value_or(0);
  }
  if (address) {
    out.master_address = *address;
  } else if (out.launcher == "SLURM") {
    out.master_address = slurm_address(variables);
  } else {
    check_one_host(variables, out);
    out.master_address = "127.0.0.1";
  }
  out.master_port = kDefaultPort;
  for (const char* job : {"PMIX_NAMESPACE", "SLURM_JOB_ID"})
    if (const auto* id = find(variables, job)) out.master_port = port_of(*id);
  if (has_port) out.master_port = number(variables, "MASTER_PORT");
  SHARDFIELD_CHECK(out.master_port > 0 && out.master_port < 65536, kOp,
                   "expected MASTER_PORT in [1, 65535], got ", out.master_port);
}

/// Two launchers that both claim this process must agree; else one of them is a leftover.
void check_agreement(const Variables& variables, const LaunchEnvironment& chosen,
                     const Names& other) {
  if (!started_by(variables, other)) return;
  const LaunchEnvironment second = read_ranks(variables, other);
  SHARDFIELD_CHECK(chosen.rank == second.rank && chosen.world_size == second.world_size, kOp,
                   chosen.launcher, " says rank ", chosen.rank, " of ", chosen.world_size, ", ",
                   second.launcher, " says rank ", second.rank, " of ", second.world_size,
                   "; unset the variables of the one that did not start this process or set ",
                   kLauncherVariable, "; found ", listed(variables));
}

const Names& names_of(const std::string& launcher) {
  for (const Names& names : launchers())
    if (launcher == names.launcher) return names;
  SHARDFIELD_CHECK(false, kOp, "expected ENV, SLURM, OPENMPI, MPICH or SINGLE in ",
                   kLauncherVariable, ", got '", launcher, "'");
}

/// WORLD_SIZE alone is often exported beside a launcher that numbers the ranks itself.
bool only_world_size(const Variables& variables, const Names& names) {
  if (names.launcher != std::string("ENV") || find(variables, names.rank)) return false;
  for (const Names& other : launchers())
    if (find(variables, other.rank)) return true;
  return false;
}

/// A local rank without a rank is what is left of a launcher's set: each process would run alone.
const Names* local_rank_alone(const Variables& variables) {
  for (const Names& names : launchers()) {
    if (names.launcher == std::string("SLURM")) continue;
    for (const char* name : names.local_rank)
      if (find(variables, name)) return &names;
  }
  return nullptr;
}

const Names* detect(const Variables& variables) {
  const Names* chosen = nullptr;
  // A batch script's own process carries SLURM's variables although mpirun or torchrun starts us.
  const bool elastic = find(variables, "TORCHELASTIC_RUN_ID") != nullptr;
  for (const Names& names : launchers()) {
    if (!started_by(variables, names) || only_world_size(variables, names)) continue;
    if (!chosen) {
      chosen = &names;
      if (elastic) break;
    } else if (names.launcher != std::string("SLURM")) {
      check_agreement(variables, read_ranks(variables, *chosen), names);
    }
  }
  if (chosen && !find(variables, "RANK") && find(variables, "WORLD_SIZE")) {
    const int launched = read_ranks(variables, *chosen).world_size;
    SHARDFIELD_CHECK(number(variables, "WORLD_SIZE") == launched, kOp, chosen->launcher,
                     " started ", launched,
                     " ranks, but WORLD_SIZE=", *find(variables, "WORLD_SIZE"),
                     "; unset it; found ", listed(variables));
  }
  return chosen ? chosen : local_rank_alone(variables);
}

}  // namespace

Variables launch_variables() {
  Variables found;
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string text = *entry;
    const auto equals = text.find('=');
    const std::string name = text.substr(0, equals);
    for (const std::string& prefix : kPrefixes)
      if (name == prefix || (prefix.ends_with('_') && name.starts_with(prefix)) ||
          (prefix == "MPI_LOCAL" && name.starts_with(prefix)))
        found[name] = equals == std::string::npos ? "" : text.substr(equals + 1);
  }
  return found;
}

LaunchEnvironment read_launch_environment(const Variables& variables, const std::string& method) {
  std::string wanted = method;
  if (wanted.empty())
    if (const auto* chosen = find(variables, kLauncherVariable)) wanted = *chosen;
  const Names* names = nullptr;
  if (wanted.empty()) names = detect(variables);
  if (!wanted.empty() && wanted != "SINGLE") names = &names_of(wanted);
  if (!names) {
    LaunchEnvironment single;
    single.launcher = "SINGLE";
    return single;
  }
  LaunchEnvironment out = read_ranks(variables, *names);
  read_rendezvous(variables, out);
  if (out.local_rank < 0) {
    // Without a launcher's word: all on one host unless LOCAL_WORLD_SIZE says otherwise.
    const auto per_host = first_number(variables, {"LOCAL_WORLD_SIZE"});
    out.local_rank = per_host.value_or(0) > 0 ? out.rank % *per_host : out.rank;
  }
  return out;
}

int device_index(int local_rank, int visible) {
  return visible > 0 ? std::max(local_rank, 0) % visible : -1;
}

std::string first_host(const std::string& node_list) {
  const auto bracket = node_list.find('[');
  const auto comma = node_list.find(',');
  if (bracket == std::string::npos || comma < bracket) return node_list.substr(0, comma);
  const auto close = node_list.find(']', bracket);
  SHARDFIELD_CHECK(close != std::string::npos, kOp, "cannot read SLURM's node list '", node_list,
                   "'; export MASTER_ADDR=<host of rank 0>");
  const auto end = node_list.find_first_of(",-]", bracket + 1);
  const auto next = node_list.find(',', close);
  const std::string tail =
      node_list.substr(close + 1, next == std::string::npos ? next : next - close - 1);
  return node_list.substr(0, bracket) + node_list.substr(bracket + 1, end - bracket - 1) + tail;
}

}  // namespace shardfield::comm
