#include "shardfield/comm/vector_collectives.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/comm/fused_all_reduce.h"
#include "shardfield/comm/in_process.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {
namespace {

constexpr auto kTimeout = std::chrono::seconds(20);
using at::Tensor;
using spec::Mesh;

Tensor rows_of(int rank, int64_t rows) {
  return (at::arange(rows * 2, at::kDouble) + 10 * rank).view({rows, 2});
}

TEST(VectorCollectives, GatherEverywhereAndItsTwoDerivatives) {
  run_in_process(
      {3},
      [](const Mesh& mesh) {
        const std::vector<int64_t> sizes = {2, 0, 3};
        Tensor x = rows_of(mesh.rank, sizes[mesh.rank]).requires_grad_();
        const Tensor all = all_gather_v(x, mesh, sizes);
        EXPECT_TRUE(at::equal(all, at::cat({rows_of(0, 2), rows_of(2, 3)})));
        // Every rank's loss is sum(all^3): the summed gradient is 3 * 3x^2, its derivative 3 * 6x.
        const Tensor grad = torch::autograd::grad({all.pow(3).sum()}, {x}, {}, true, true)[0];
        EXPECT_TRUE(at::allclose(grad, 9 * x.pow(2)));
        const Tensor second = torch::autograd::grad({grad.sum()}, {x})[0];
        EXPECT_TRUE(at::allclose(second, 18 * x));
      },
      kTimeout);
}

TEST(VectorCollectives, ScatterFromRankTwoWithoutTensorsElsewhere) {
  run_in_process(
      {3},
      [](const Mesh& mesh) {
        const std::vector<int64_t> sizes = {1, 3, 0};
        Tensor whole = rows_of(0, 4).requires_grad_();
        std::optional<Tensor> given;
        if (mesh.rank == 2) given = whole;
        const Tensor mine = scatter_v(given, mesh, sizes, 0, 2, at::kCPU);
        EXPECT_TRUE(at::equal(mine, rows_of(0, 4).split_with_sizes({1, 3, 0})[mesh.rank]));
        (mine * (mesh.rank + 1)).sum().backward();
        if (mesh.rank == 2) {
          const Tensor want = at::tensor({1., 2., 2., 2.}, at::kDouble).view({4, 1}).expand({4, 2});
          EXPECT_TRUE(at::equal(whole.grad(), want));
        }
      },
      kTimeout);
}

TEST(VectorCollectives, ACallThatDoesNotFitIsRefusedOnEveryRank) {  // case J5
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        const Tensor x = at::ones({mesh.rank == 0 ? 4 : 2});
        try {
          all_gather_v(x, mesh, {4, 4});
          ADD_FAILURE() << "no error on rank " << mesh.rank;
        } catch (const c10::Error& error) {
          const std::string text = error.what();
          EXPECT_NE(text.find('4'), std::string::npos);
          EXPECT_NE(text.find('2'), std::string::npos);
        }
        EXPECT_TRUE(at::equal(all_gather_v(at::ones({1}), mesh, {1, 1}), at::ones({2})));
      },
      kTimeout);
}

TEST(FusedAllReduce, ManyTensorsInOneMessagePerDtype) {
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        std::vector<Tensor> tensors;
        for (int64_t i = 0; i < 10; ++i) tensors.push_back(at::full({i, 2}, 1. + mesh.rank));
        tensors.push_back(at::tensor({mesh.rank == 0 ? 1 : 0, 0}) != 0);
        tensors.push_back(at::arange(6, at::kDouble).slice(0, 0, 6, 2));
        const auto record = start_recording();
        const auto sums = fused_all_reduce(tensors, mesh);
        stop_recording(record);
        EXPECT_TRUE(at::equal(sums[9], at::full({9, 2}, 3.)));
        EXPECT_TRUE(at::equal(sums[10], at::tensor({1, 0}) != 0));
        EXPECT_TRUE(at::equal(sums[11], at::tensor({0., 4., 8.}, at::kDouble)));
        // float, byte and double, and the comparison of the call.
        EXPECT_EQ(record->rows.at({"", "fused_all_reduce"}).messages, 4);
      },
      kTimeout);
}

}  // namespace
}  // namespace shardfield::comm
