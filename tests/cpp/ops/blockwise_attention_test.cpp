#include "shardfield/ops/blockwise_attention.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

namespace shardfield::ops {
namespace {

using at::Tensor;

/// Value and gradients, block after block, against PyTorch's attention.
void compare(const std::vector<int64_t>& blocks, int64_t features, bool is_causal, bool masked,
             at::IntArrayRef batch = {2, 3}, bool by_delta = false) {
  torch::manual_seed(1);
  int64_t keys = 0;
  for (const int64_t n : blocks) keys += n;
  const auto random = [&](int64_t rows, int64_t columns) {
    std::vector<int64_t> sizes = batch.vec();
    sizes.insert(sizes.end(), {rows, columns});
    return at::randn(sizes, at::kDouble).requires_grad_();
  };
  const Tensor q = random(9, 5), k = random(keys, 5), v = random(keys, features);
  const Tensor mask = masked ? at::randn({9, keys}, at::kDouble).requires_grad_() : Tensor();
  const auto given = masked ? std::optional<Tensor>(mask) : std::nullopt;
  const Tensor want = at::scaled_dot_product_attention(q, k, v, given, 0.0, is_causal);
  const Tensor grad = at::randn_like(want);
  std::vector<Tensor> inputs{q, k, v};
  if (masked) inputs.push_back(mask);
  const auto gradients = torch::autograd::grad({want}, inputs, {grad});

  const at::NoGradGuard no_grad;
  const double scale = 1 / std::sqrt(5.0);
  const auto for_blocks = [&](auto&& use) {
    int64_t first = 0;
    for (const int64_t n : blocks) {
      const Tensor columns = masked ? mask.narrow(-1, first, n) : Tensor();
      use(KeyBlock{k.narrow(-2, first, n), v.narrow(-2, first, n), columns, is_causal, 0, first},
          first, n);
      first += n;
    }
  };
  BlockwiseAttention attention(q, features, scale);
  for_blocks([&](const KeyBlock& block, int64_t, int64_t) { attention.add(block); });
  EXPECT_TRUE(at::allclose(attention.output(), want, 1e-10, 1e-12));
  BlockwiseAttentionGradient gradient(q, attention.logsumexp(), grad, scale);
  if (by_delta)
    gradient.set_delta((grad * attention.output()).sum(-1, true));
  else
    gradient.set_output(attention.output());
  for_blocks([&](const KeyBlock& block, int64_t first, int64_t n) {
    const BlockGradients part = gradient.add(block, masked);
    EXPECT_TRUE(at::allclose(part.key, gradients[1].narrow(-2, first, n), 1e-9, 1e-11));
    EXPECT_TRUE(at::allclose(part.value, gradients[2].narrow(-2, first, n), 1e-9, 1e-11));
    if (masked) {
      EXPECT_TRUE(at::allclose(part.mask, gradients[3].narrow(-1, first, n), 1e-9, 1e-11));
    }
  });
  EXPECT_TRUE(at::allclose(gradient.query(), gradients[0], 1e-9, 1e-11));
}

TEST(BlockwiseAttention, EqualsAttentionInOneGo) {
  compare({4, 0, 7, 1}, 6, false, false);
  compare({4, 7, 1}, 5, false, false);  // the fused kernel
  compare({9}, 5, true, false);
  compare({3, 3, 3}, 5, true, false);
  compare({4, 7}, 6, false, true);
  compare({4, 7}, 6, true, false, {});
  compare({4, 7}, 6, false, false, {2, 3}, true);
  compare({9}, 5, true, false, {2, 3}, true);
}

TEST(BlockwiseAttention, RowsWithoutKeysAreZeros) {
  const Tensor q = at::randn({1, 1, 3, 4}), k = at::randn({1, 1, 2, 4});
  BlockwiseAttention attention(q, 4, 1.0);
  EXPECT_TRUE(at::equal(attention.output(), at::zeros({1, 1, 3, 4})));
  const Tensor mask = at::zeros({3, 2}, at::kBool);
  attention.add({k, k, mask});
  EXPECT_TRUE(at::equal(attention.output(), at::zeros({1, 1, 3, 4})));
  EXPECT_TRUE(attention.logsumexp().isinf().all().item<bool>());
}

}  // namespace
}  // namespace shardfield::ops
