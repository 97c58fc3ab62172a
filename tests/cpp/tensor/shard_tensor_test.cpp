#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/shardfield.h"
#include "shardfield/tensor/redistribute.h"

namespace shardfield::tensor {
namespace {

constexpr auto kTimeout = std::chrono::seconds(30);

at::Tensor range(at::IntArrayRef sizes) {
  return at::arange(c10::multiply_integers(sizes), at::kDouble).reshape(sizes);
}

TEST(ShardTensor, RoundTripsEveryPairOfLayouts) {  // case B13
  const std::vector<std::vector<spec::Cut>> forms = {{},
                                                     {{0, {0}, {3, 2}}},
                                                     {{0, {1}, {0, 5}}},
                                                     {{0, {0, 1}, {2, 1, 1, 1}}},
                                                     {{0, {1, 0}, {2, 1, 1, 1}}},
                                                     {{0, {0}, {4, 1}}, {1, {1}, {2, 4}}},
                                                     {{1, {0, 1}, {0, 3, 3, 0}}}};
  run_in_process(
      {2, 2},
      [&](const Mesh& mesh) {
        const at::Tensor full = range({5, 6, 2});
        for (const auto& a : forms) {
          for (const auto& b : forms) {
            const auto* from = spec::intern_layout(mesh, a);
            const auto* to = spec::intern_layout(mesh, b);
            const at::Tensor moved = redistribute(redistribute(full, from), to);
            EXPECT_TRUE(at::equal(full_tensor(moved), full));
            if (to) {
              EXPECT_TRUE(at::equal(piece_of(moved), slice_piece(full, *to)));
            }
          }
        }
      },
      kTimeout);
}

TEST(ShardTensor, MergedDimsGather) {
  run_in_process(
      {2, 2},
      [](const Mesh& mesh) {
        const at::Tensor full = range({2, 3, 5, 4});
        const at::Tensor x = shard_tensor(full, mesh, {2, 3});
        EXPECT_TRUE(at::equal(full_tensor(x.reshape({-1})), full.reshape({-1})));
        EXPECT_TRUE(at::equal(full_tensor(x.permute({0, 2, 3, 1}).reshape({-1, 3})),
                              full.permute({0, 2, 3, 1}).reshape({-1, 3})));
      },
      kTimeout);
}

TEST(ShardTensor, StorageAccessThrows) {
  run_in_process(
      {1},
      [](const Mesh& mesh) {
        const at::Tensor x = shard_tensor(range({4, 2}), mesh, {0});
        EXPECT_THROW(x.data_ptr(), c10::Error);
        EXPECT_THROW(x.storage(), c10::Error);
      },
      kTimeout);
}

TEST(ShardTensor, TwoMeshesInOneCall) {
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        const Mesh* other = comm::make_mesh(mesh.shape, {}, mesh.rank,
                                            {comm::groups_of(mesh).whole.backend("test")},
                                            {{comm::groups_of(mesh).axis[0].backend("test")}});
        const at::Tensor a = shard_tensor(range({4, 2}), mesh, {0});
        const at::Tensor b = shard_tensor(range({4, 2}), *other, {0});
        EXPECT_THROW(a + b, c10::Error);
      },
      kTimeout);
}

TEST(ShardTensor, DataAssignmentTakesTheNewElements) {
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        at::Tensor x = shard_tensor(range({4, 2}), mesh, {0});
        x.set_data(shard_tensor(range({4, 2}) + 10, mesh, {0}));
        EXPECT_TRUE(at::equal(full_tensor(x), range({4, 2}) + 10));
      },
      kTimeout);
}

TEST(ShardTensor, TrainsLikeOneDevice) {
  torch::manual_seed(1);
  const at::Tensor full = at::randn({2, 6, 5}, at::kDouble);
  torch::nn::Sequential serial(torch::nn::Linear(5, 8), torch::nn::Tanh(), torch::nn::Linear(8, 1));
  serial->to(at::kDouble);
  std::vector<at::Tensor> start;
  for (auto& p : serial->parameters()) start.push_back(p.detach().clone());
  const auto train = [](torch::nn::Sequential& net, const at::Tensor& x) {
    torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
    double loss_value = 0;
    for (int step = 0; step < 5; ++step) {
      sgd.zero_grad();
      at::Tensor loss = (net->forward(x) - 1).square().mean();
      loss.backward();
      sgd.step();
      loss_value = loss.item<double>();
    }
    return loss_value;
  };
  const double expected = train(serial, full);
  for (const int64_t ranks : {1, 2, 3, 4}) {
    run_in_process(
        {ranks},
        [&](const Mesh& mesh) {
          torch::nn::Sequential net(torch::nn::Linear(5, 8), torch::nn::Tanh(),
                                    torch::nn::Linear(8, 1));
          net->to(at::kDouble);
          {
            const at::NoGradGuard no_grad;
            for (size_t i = 0; i < start.size(); ++i) net->parameters()[i].copy_(start[i]);
          }
          EXPECT_NEAR(train(net, shard_tensor(full, mesh, {1})), expected, 1e-12);
          for (size_t i = 0; i < start.size(); ++i)
            EXPECT_TRUE(at::allclose(net->parameters()[i], serial->parameters()[i], 1e-10));
        },
        kTimeout);
  }
}

}  // namespace
}  // namespace shardfield::tensor
