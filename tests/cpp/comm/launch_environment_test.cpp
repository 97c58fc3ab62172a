#include "shardfield/comm/launch_environment.h"

#include <string>

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace shardfield::comm {
namespace {

std::string error_of(const Variables& variables, const std::string& method = {}) {
  try {
    read_launch_environment(variables, method);
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return {};
}

bool says(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

const Variables kTorchrun = {{"RANK", "3"},
                             {"WORLD_SIZE", "4"},
                             {"LOCAL_RANK", "1"},
                             {"MASTER_ADDR", "h"},
                             {"MASTER_PORT", "29500"}};
const Variables kSlurm = {{"SLURM_PROCID", "2"},
                          {"SLURM_NTASKS", "4"},
                          {"SLURM_LOCALID", "0"},
                          {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.7"},
                          {"SLURM_JOB_ID", "77"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "1"},
                            {"OMPI_COMM_WORLD_SIZE", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}};
const Variables kMpich = {{"PMI_RANK", "0"}, {"PMI_SIZE", "2"}, {"MPI_LOCALRANKID", "0"}};

Variables joined(const Variables& a, const Variables& b) {
  Variables all = a;
  all.insert(b.begin(), b.end());
  return all;
}

TEST(LaunchEnvironment, EveryLauncher) {  // case K3
  EXPECT_EQ(read_launch_environment(kTorchrun), (LaunchEnvironment{"ENV", 3, 4, 1, "h", 29500}));
  const auto slurm = read_launch_environment(kSlurm);
  EXPECT_EQ(slurm, (LaunchEnvironment{"SLURM", 2, 4, 0, "10.0.0.7", slurm.master_port}));
  EXPECT_TRUE(slurm.master_port >= 20000 && slurm.master_port < 32000);
  EXPECT_EQ(read_launch_environment(kOpenMpi),
            (LaunchEnvironment{"OPENMPI", 1, 2, 1, "127.0.0.1", 12355}));
  EXPECT_EQ(read_launch_environment(kMpich),
            (LaunchEnvironment{"MPICH", 0, 2, 0, "127.0.0.1", 12355}));
  EXPECT_EQ(read_launch_environment({}), (LaunchEnvironment{"SINGLE", 0, 1, 0, "", 0}));
}

TEST(LaunchEnvironment, TheOrderAndTheOverride) {
  const Variables torchrun_in_slurm = joined(kTorchrun, kSlurm);
  EXPECT_EQ(read_launch_environment(torchrun_in_slurm).launcher, "ENV");
  EXPECT_EQ(read_launch_environment(joined(torchrun_in_slurm, {{kLauncherVariable, "SLURM"}})),
            (LaunchEnvironment{"SLURM", 2, 4, 0, "h", 29500}));
  EXPECT_EQ(read_launch_environment(torchrun_in_slurm, "SINGLE").world_size, 1);
  EXPECT_TRUE(says(error_of(kSlurm, "TORCH"), "expected ENV, SLURM, OPENMPI, MPICH or SINGLE"));
}

TEST(LaunchEnvironment, LaunchersThatDisagreeAreRefused) {  // case K7
  Variables reversed = kOpenMpi;
  reversed.insert({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "h"}, {"MASTER_PORT", "1"}});
  const std::string text = error_of(reversed);
  EXPECT_TRUE(says(text, "ENV says rank 0 of 2, OPENMPI says rank 1 of 2")) << text;
  EXPECT_TRUE(says(text, kLauncherVariable));
  reversed["RANK"] = "1";
  EXPECT_EQ(read_launch_environment(reversed).launcher, "ENV");
  // torchrun's own agent, started once per host by mpirun, numbers its workers itself.
  reversed["RANK"] = "0";
  reversed["TORCHELASTIC_RUN_ID"] = "x";
  EXPECT_EQ(read_launch_environment(reversed).rank, 0);
  EXPECT_TRUE(says(error_of(joined(kSlurm, kOpenMpi)), "SLURM says rank 2 of 4, OPENMPI"));
}

TEST(LaunchEnvironment, IncompleteOrWrongVariablesAreListed) {
  const std::string partial = error_of({{"RANK", "0"}, {"MASTER_ADDR", "h"}});
  EXPECT_TRUE(says(partial, "expected RANK and WORLD_SIZE")) << partial;
  EXPECT_TRUE(says(partial, "MASTER_ADDR=h, RANK=0")) << partial;
  EXPECT_TRUE(says(error_of({{"WORLD_SIZE", "2"}}), "expected RANK and WORLD_SIZE"));
  for (const char* left : {"LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"})
    EXPECT_TRUE(says(error_of({{left, "1"}}), std::string("found ") + left + "=1"));
  EXPECT_EQ(read_launch_environment({{"SLURM_LOCALID", "0"}, {"SLURM_NTASKS", "4"}}).launcher,
            "SINGLE");
  Variables wrong = kTorchrun;
  wrong["RANK"] = "4";
  EXPECT_TRUE(says(error_of(wrong), "expected RANK below WORLD_SIZE=4, got 4"));
  wrong["RANK"] = "one";
  EXPECT_TRUE(says(error_of(wrong), "expected a whole number in RANK, got 'one'"));
  wrong = kTorchrun;
  wrong.erase("MASTER_PORT");
  EXPECT_TRUE(says(error_of(wrong), "expected MASTER_ADDR and MASTER_PORT"));
  Variables hosts = kOpenMpi;
  hosts["OMPI_COMM_WORLD_LOCAL_SIZE"] = "1";
  EXPECT_TRUE(says(error_of(hosts), "export MASTER_ADDR"));
  hosts["MASTER_ADDR"] = "n1";
  EXPECT_EQ(read_launch_environment(hosts).master_address, "n1");
}

TEST(LaunchEnvironment, TheAcceleratorOfALocalRank) {  // case K3
  EXPECT_EQ(device_index(3, 1), 0);
  EXPECT_EQ(device_index(0, 4), 0);
  EXPECT_EQ(device_index(3, 4), 3);
  EXPECT_EQ(device_index(5, 4), 1);
  EXPECT_EQ(device_index(3, 0), -1);
  EXPECT_EQ(device_index(-1, 2), 0);
}

TEST(LaunchEnvironment, TorchrunsAgentKeepsTheStore) {
  EXPECT_EQ(read_launch_environment(kTorchrun).agent_restarts, -1);
  Variables agent = kTorchrun;
  agent.insert({{"TORCHELASTIC_RUN_ID", "none"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  EXPECT_EQ(read_launch_environment(agent).agent_restarts, 0);
  agent["TORCHELASTIC_RESTART_COUNT"] = "2";
  EXPECT_EQ(read_launch_environment(agent).agent_restarts, 2);
  agent["TORCHELASTIC_USE_AGENT_STORE"] = "False";
  EXPECT_EQ(read_launch_environment(agent).agent_restarts, -1);
}

TEST(LaunchEnvironment, AWorldSizeBesideALauncherMustAgree) {
  EXPECT_EQ(read_launch_environment(joined(kSlurm, {{"WORLD_SIZE", "4"}})).launcher, "SLURM");
  EXPECT_TRUE(says(error_of(joined(kSlurm, {{"WORLD_SIZE", "8"}})), "WORLD_SIZE=8"));
}

TEST(LaunchEnvironment, SlurmWithoutALaunchAddress) {  // case K3
  Variables slurm = kSlurm;
  slurm.erase("SLURM_LAUNCH_NODE_IPADDR");
  EXPECT_TRUE(says(error_of(slurm), "SLURM_LAUNCH_NODE_IPADDR"));
  slurm["SLURM_JOB_NODELIST"] = "gpu[007-012,020],login1";
  EXPECT_EQ(read_launch_environment(slurm).master_address, "gpu007");
  EXPECT_EQ(first_host("n1,n2"), "n1");
  EXPECT_EQ(first_host("n1"), "n1");
  EXPECT_EQ(first_host("a,b[1-2]"), "a");
  EXPECT_EQ(first_host("rack[3,5]-x,b"), "rack3-x");
  EXPECT_THROW(first_host("n[1-2"), c10::Error);
}

}  // namespace
}  // namespace shardfield::comm
