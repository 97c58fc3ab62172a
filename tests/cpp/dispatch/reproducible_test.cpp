// Reproducible mode from C++: equal bits for every number of ranks, exact slices.

#include "shardfield/dispatch/reproducible.h"

#include <mutex>
#include <set>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/ops/exact_sums.h"
#include "shardfield/shardfield.h"

namespace shardfield {
namespace {

constexpr auto kTimeout = std::chrono::seconds(60);

/// On while it lives.
struct Reproducible {
  Reproducible() { set_reproducible(true); }
  ~Reproducible() { set_reproducible(false); }
};

at::Tensor numbers(at::IntArrayRef sizes, double phase, at::ScalarType type) {
  const int64_t n = c10::multiply_integers(sizes);
  return (at::sin(at::arange(n, at::kDouble) * 0.7 + phase) * 3).reshape(sizes).to(type);
}

std::string bits_of(const at::Tensor& t) {
  const at::Tensor dense = full_tensor(t.detach()).contiguous();
  return {static_cast<const char*>(dense.data_ptr()), dense.nbytes()};
}

/// Bits of the loss and of every weight gradient after one step of a small net.
std::string train(const Mesh& mesh, int dim, at::ScalarType type) {
  const at::Tensor x = shard_tensor(numbers({2, 3, 13, 11}, 0.1, type), mesh, {dim});
  const at::Tensor kernel = numbers({4, 3, 3, 3}, 0.2, type).requires_grad_();
  const at::Tensor scale = numbers({4}, 0.3, type).requires_grad_();
  const at::Tensor mixing = numbers({5, 4}, 0.4, type).requires_grad_();
  at::Tensor y = at::gelu(at::group_norm(at::conv2d(x, kernel, {}, 1, 1), 2, scale));
  y = at::linear(y.permute({0, 2, 3, 1}), mixing).sigmoid();
  const at::Tensor loss = y.square().mean() + y.log().var();
  loss.backward();
  return bits_of(loss) + bits_of(kernel.grad()) + bits_of(scale.grad()) + bits_of(mixing.grad());
}

TEST(Reproducible, TrainingHasTheSameBitsOnEveryNumberOfRanks) {
  const Reproducible mode;
  for (const at::ScalarType type : {at::kFloat, at::kDouble}) {
    std::set<std::string> seen;
    std::mutex mutex;
    for (const int ranks : {1, 2, 3, 4}) {
      for (const int dim : {2, 3}) {
        run_in_process(
            {ranks},
            [&](const Mesh& mesh) {
              const std::string bits = train(mesh, dim, type);
              const std::lock_guard<std::mutex> lock(mutex);
              seen.insert(bits);
            },
            kTimeout);
      }
    }
    EXPECT_EQ(seen.size(), 1U);
  }
}

TEST(Reproducible, SlicesAddUpAndFitTheirBits) {
  const at::Tensor x = numbers({40}, 0.5, at::kDouble) * at::pow(2.0, at::arange(40) - 20);
  const auto slices = ops::sliced(x, 20);
  ASSERT_TRUE(slices);
  at::Tensor total = at::zeros_like(x);
  for (size_t i = 0; i < slices->parts.size(); ++i) {
    EXPECT_LE(slices->parts[i].abs().max().item<double>(), std::ldexp(1.0, 20));
    EXPECT_TRUE(at::equal(slices->parts[i], slices->parts[i].round()));
    total = total + slices->parts[i] * std::ldexp(1.0, slices->exponent - 20 * int(i + 1));
  }
  EXPECT_LE((total - x).abs().max().item<double>(), std::ldexp(x.abs().max().item<double>(), -70));
  EXPECT_FALSE(ops::sliced(at::full({3}, INFINITY), 20));
  EXPECT_TRUE(at::equal(ops::sliced(at::zeros({3}), 20)->parts[0], at::zeros({3}, at::kDouble)));
}

TEST(Reproducible, TheCountOfTermsBoundsTheBits) {
  for (const int64_t terms : {1, 2, 1000, 1 << 20}) {
    EXPECT_LE(std::ldexp(static_cast<double>(terms), 2 * ops::bits_for_products(terms)), 0x1p53);
    EXPECT_LE(std::ldexp(static_cast<double>(terms), ops::bits_for_sum(terms)), 0x1p53);
  }
}

}  // namespace
}  // namespace shardfield
