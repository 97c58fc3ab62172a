// A network of many layers trained by ranks that are threads: every first use of a table or a cache
// happens on several threads at once, which the thread sanitizer watches.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/comm/in_process.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/scatter.h"

namespace shardfield::ops {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

struct NetImpl : nn::Module {
  NetImpl() {
    lift = register_module("lift", nn::Conv2d(nn::Conv2dOptions(2, 6, 3).padding(1)));
    batch = register_module("batch", nn::BatchNorm2d(6));
    down = register_module("down", nn::Conv2d(nn::Conv2dOptions(6, 8, 4).stride(2).padding(1)));
    group = register_module("group", nn::GroupNorm(2, 8));
    up = register_module(
        "up", nn::ConvTranspose2d(nn::ConvTranspose2dOptions(8, 6, 4).stride(2).padding(1)));
    layer = register_module("layer", nn::LayerNorm(nn::LayerNormOptions({6})));
    mix = register_module("mix", nn::Linear(6, 2));
  }

  at::Tensor forward(const at::Tensor& x) {
    at::Tensor y = F::gelu(batch(lift(x)));
    at::Tensor z = F::silu(group(down(y)));
    z = z + at::max_pool2d(z, {3, 3}, {1, 1}, {1, 1});
    y = at::cat({y, up(z)}, 1)
            .mul(0.5)
            .index({torch::indexing::Slice(), torch::indexing::Slice(3, 9)});
    y.slice(2, 1, 3).mul_(2);
    y = layer(y.permute({0, 2, 3, 1}));
    return at::softmax(mix(y), 3).permute({0, 3, 1, 2}) + y.mean({1, 2}).sum();
  }

  nn::Conv2d lift{nullptr}, down{nullptr};
  nn::BatchNorm2d batch{nullptr};
  nn::GroupNorm group{nullptr};
  nn::ConvTranspose2d up{nullptr};
  nn::LayerNorm layer{nullptr};
  nn::Linear mix{nullptr};
};
TORCH_MODULE(Net);

/// The losses of five steps from the same first weights; `cut` makes the pieces.
std::vector<double> losses(const std::map<std::string, at::Tensor>& start,
                           const std::function<at::Tensor(const at::Tensor&)>& cut) {
  Net net;
  net->to(at::kDouble);
  {
    const torch::NoGradGuard no_grad;
    for (auto& entry : net->named_parameters()) entry.value().copy_(start.at(entry.key()));
  }
  torch::optim::AdamW optimizer(net->parameters(), torch::optim::AdamWOptions(1e-2));
  const at::Tensor x =
      at::arange(2 * 2 * 12 * 10, at::kDouble).view({2, 2, 12, 10}).mul(0.37).sin();
  std::vector<double> out;
  for (int step = 0; step < 5; ++step) {
    optimizer.zero_grad();
    const at::Tensor loss = F::mse_loss(net(cut(x)), cut(x.cos()));
    loss.backward();
    optimizer.step();
    out.push_back(loss.item<double>());
  }
  return out;
}

TEST(Training, RanksAsThreadsEqualOneDevice) {
  torch::manual_seed(0);
  Net first;
  first->to(at::kDouble);
  std::map<std::string, at::Tensor> start;
  for (const auto& entry : first->named_parameters()) start[entry.key()] = entry.value().detach();
  const auto want = losses(start, [](const at::Tensor& t) { return t; });
  EXPECT_LT(want.back(), want.front());
  for (const std::vector<int64_t>& shape : {std::vector<int64_t>{2}, {3}, {2, 2}}) {
    comm::run_in_process(
        shape,
        [&](const spec::Mesh& mesh) {
          const std::vector<int> dims =
              shape.size() == 1 ? std::vector<int>{2} : std::vector<int>{2, 3};
          const auto got = losses(
              start, [&](const at::Tensor& t) { return tensor::shard_tensor(t, mesh, dims); });
          for (size_t i = 0; i < want.size(); ++i)
            EXPECT_NEAR(got[i], want[i], 1e-10) << "step " << i << " on rank " << mesh.rank;
        },
        std::chrono::seconds(120));
  }
}

}  // namespace
}  // namespace shardfield::ops
