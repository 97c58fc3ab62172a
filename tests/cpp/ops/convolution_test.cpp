// Convolution over ranks that are threads: value, gradient and second gradient beside the plain op.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "shardfield/ops/convolution_halo.h"
#include "shardfield/shardfield.h"

namespace {

using at::Tensor;
using torch::autograd::grad;
using torch::autograd::variable_list;

const std::vector<std::vector<int64_t>> kMeshes = {{1}, {2}, {3}, {4}, {2, 2}};

Tensor numbers(at::IntArrayRef sizes, double phase) {
  int64_t n = 1;
  for (int64_t s : sizes) n *= s;
  return at::sin(at::arange(n, at::kDouble) * 0.7 + phase).reshape(sizes);
}

struct Results {
  Tensor output;
  variable_list first, second;
};

using Net = std::function<Tensor(const variable_list&)>;

Results run(const Net& net, variable_list inputs) {
  Results r;
  r.output = net(inputs);
  const Tensor loss = (r.output * r.output).sum();
  r.first = grad({loss}, inputs, {}, std::nullopt, true);
  Tensor penalty = at::zeros({}, at::kDouble);
  for (const Tensor& g : r.first) penalty = penalty + (g * g).sum();
  r.second = grad({penalty}, inputs);
  return r;
}

void expect_same(const Tensor& got, const Tensor& want, const char* what) {
  const Tensor full = shardfield::full_tensor(got).detach();
  ASSERT_EQ(full.sizes(), want.sizes()) << what;
  const double scale = std::max(1e-12, want.abs().max().item<double>());
  EXPECT_LT((full - want).abs().max().item<double>() / scale, 1e-12) << what;
}

void compare(const Net& net, const Tensor& x, const variable_list& weights) {
  variable_list plain{x.clone().requires_grad_()};
  for (const Tensor& w : weights) plain.push_back(w.clone().requires_grad_());
  const Results want = run(net, plain);
  for (const auto& shape : kMeshes) {
    shardfield::run_in_process(shape, [&](const shardfield::Mesh& mesh) {
      const std::vector<int> dims =
          shape.size() == 2 ? std::vector<int>{2, 3} : std::vector<int>{2};
      variable_list mine{shardfield::shard_tensor(x, mesh, dims).requires_grad_()};
      for (const Tensor& w : weights) mine.push_back(w.clone().requires_grad_());
      const Results got = run(net, mine);
      ASSERT_TRUE(shardfield::is_sharded(got.output));
      ASSERT_TRUE(shardfield::is_sharded(got.first[0]));
      expect_same(got.output, want.output, "output");
      for (size_t i = 0; i < mine.size(); ++i) {
        expect_same(got.first[i], want.first[i], "gradient");
        expect_same(got.second[i], want.second[i], "second gradient");
      }
    });
  }
}

TEST(Convolution, SecondGradientThroughTwoLayers) {
  const Net net = [](const variable_list& v) {
    const Tensor hidden = at::tanh(at::conv2d(v[0], v[1], v[2], 1, 1));
    return at::conv2d(hidden, v[3], v[4], 1, 2);
  };
  compare(net, numbers({1, 2, 13, 9}, 0.1),
          {numbers({3, 2, 3, 3}, 0.2), numbers({3}, 0.3), numbers({2, 3, 5, 5}, 0.4),
           numbers({2}, 0.5)});
}

TEST(Convolution, SecondGradientStridedAndTransposed) {
  const Net net = [](const variable_list& v) {
    const Tensor hidden = at::tanh(at::conv2d(v[0], v[1], v[2], 2, 1));
    return at::conv_transpose2d(hidden, v[3], {}, 2, 1, 1);
  };
  compare(net, numbers({2, 2, 11, 10}, 0.1),
          {numbers({5, 2, 3, 3}, 0.2), numbers({5}, 0.3), numbers({5, 2, 3, 3}, 0.4)});
}

TEST(Convolution, KernelWiderThanThePieces) {
  const Net net = [](const variable_list& v) { return at::conv2d(v[0], v[1], {}, 1, 3); };
  compare(net, numbers({1, 1, 5, 4}, 0.1), {numbers({2, 1, 7, 7}, 0.2)});
}

TEST(ConvolutionHalo, ShellCoversWhatTheCoreLeaves) {
  using shardfield::ops::Box;
  const Box full{{0, 2}, {0, 5}, {-1, 6}}, core{{0, 2}, {1, 4}, {0, 6}};
  int64_t elements = 0;
  for (const Box& slab : shardfield::ops::shell_of(full, core)) {
    EXPECT_TRUE(shardfield::ops::is_empty(shardfield::ops::intersect(slab, core)));
    int64_t n = 1;
    for (int64_t s : shardfield::ops::sizes_of_box(slab)) n *= s;
    elements += n;
  }
  EXPECT_EQ(elements, 2 * 5 * 7 - 2 * 3 * 6);
}

TEST(ConvolutionHalo, CompactedStaysInItsMemory) {
  using shardfield::ops::Box;
  for (const auto format : {at::MemoryFormat::Contiguous, at::MemoryFormat::ChannelsLast}) {
    const Tensor t = numbers({2, 3, 9, 8}, 0.1).contiguous(format);
    const Tensor want = t.narrow(2, 1, 6).narrow(3, 2, 5).clone();
    const Tensor got = shardfield::ops::compacted(t, Box{{0, 2}, {0, 3}, {1, 7}, {2, 7}});
    EXPECT_TRUE(at::equal(got, want));
    EXPECT_TRUE(got.is_contiguous(format));
    EXPECT_EQ(got.storage().data(), t.storage().data());
  }
}

}  // namespace
