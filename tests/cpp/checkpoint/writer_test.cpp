#include "shardfield/checkpoint/writer.h"

#include <filesystem>
#include <functional>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <unistd.h>

#include "shardfield/checkpoint/load.h"
#include "shardfield/checkpoint/reader.h"
#include "shardfield/comm/in_process.h"
#include "shardfield/tensor/scatter.h"

namespace shardfield::checkpoint {
namespace {

namespace fs = std::filesystem;
constexpr auto kTimeout = std::chrono::seconds(20);

class Writer : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = fs::temp_directory_path() / ("shardfield-writer-" + std::to_string(::getpid()));
  }
  void TearDown() override { fs::remove_all(folder_); }

  std::vector<std::string> files() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(folder_))
      names.push_back(entry.path().filename());
    return names;
  }

  std::string folder_;
};

at::Tensor rows(int64_t n) {
  return at::arange(n * 2, at::kDouble).view({n, 2});
}

TEST_F(Writer, SavedOnThreeRanksReadOnTwo) {  // cases N1, N3
  comm::run_in_process(
      {3},
      [&](const spec::Mesh& mesh) {
        torch::nn::Linear linear(2, 2);
        torch::NoGradGuard no_grad;
        linear->weight.fill_(3);
        linear->bias.fill_(4);
        for (const int64_t step : {1, 2}) {
          Tensors state = tensors_of(*linear);
          state["x"] =
              tensor::shard_tensor(rows(4) * step, mesh, {0});  // pieces of 2, 2 and 0 rows
          state["z"] =
              at::complex(at::ones({3}, at::kDouble), at::full({3}, 2., at::kDouble)).conj();
          save_sharded(folder_, state, {{"step", step}}, mesh);
        }
      },
      kTimeout);
  comm::run_in_process(
      {2},
      [&](const spec::Mesh& mesh) {
        Reader reader(folder_);
        EXPECT_EQ(reader.integer("step"), 2);
        const at::Tensor x =
            tensor::shard_tensor(at::zeros({4, 2}, at::kDouble), mesh, {1}).detach();
        read_into(reader, "x", x);
        EXPECT_TRUE(at::equal(tensor::full_tensor(x), rows(4) * 2));
        const at::Tensor z = reader.read("z");
        EXPECT_TRUE(at::equal(at::imag(z), at::full({3}, -2., at::kDouble)));
        torch::nn::Linear linear(2, 2);
        load_module(reader, *linear);
        EXPECT_EQ(linear->weight.min().item<float>(), 3);
        EXPECT_EQ(linear->bias.max().item<float>(), 4);
      },
      kTimeout);
  // The first save's files are gone; each rank of the second owns something.
  EXPECT_EQ(files().size(), 4U);
}

TEST_F(Writer, RanksThatDifferAreRefusedEverywhere) {  // case N7
  comm::run_in_process(
      {2},
      [&](const spec::Mesh& mesh) {
        const auto refused = [&](const Tensors& state, int64_t step, const std::string& part) {
          try {
            save_sharded(folder_, state, {{"step", step}}, mesh);
            ADD_FAILURE() << "no error on rank " << mesh.rank;
          } catch (const c10::Error& error) {
            EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
          }
        };
        Tensors state = {{"a", at::ones({2})}};
        if (mesh.rank == 0) state["b"] = at::ones({2});
        refused(state, 1, "'b' is missing on one of the ranks 0 and 1");
        refused({{"a", at::ones({2 + mesh.rank})}}, 1, "'a' differs between ranks 0 and 1");
        refused({{"a", at::ones({2})}}, mesh.rank, "hold other values");
        refused({{"a", mesh.rank ? at::empty({2}, at::kComplexHalf) : at::ones({2})}}, 1,
                "rank 1: checkpoint: ComplexHalf has no place");
        refused({{"a", at::ones({2})}, {"a/b", at::ones({2})}}, 1,
                "'a' is a value and holds 'a/b'");
        refused({{"step/b", at::ones({2})}}, 1, "'step' is a value and holds 'step/b'");
        refused({{"step", at::ones({2})}}, 1, "'step' is a tensor and an integer");
      },
      kTimeout);
  EXPECT_TRUE(files().empty());
}

}  // namespace
}  // namespace shardfield::checkpoint
