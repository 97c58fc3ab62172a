// Attention over ranks that are threads, keys and values passing by: value and gradients beside the
// plain op.

#include <ATen/ATen.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "shardfield/shardfield.h"

namespace {

using at::Tensor;
using torch::autograd::variable_list;

constexpr int64_t kKeys = 420;  // with 4 heads of 40 and more features beyond 1 MiB

Tensor numbers(at::IntArrayRef sizes, double phase) {
  return at::sin(at::arange(c10::multiply_integers(sizes), at::kDouble) * 0.7 + phase)
      .reshape(sizes);
}

struct Case {
  int64_t rows, features;
  bool is_causal, is_masked;
};

variable_list run(const Case& c, const variable_list& inputs) {
  std::optional<Tensor> mask;
  if (c.is_masked) mask = inputs[3];
  const Tensor out = at::scaled_dot_product_attention(inputs[0], inputs[1], inputs[2], mask, 0.0,
                                                      c.is_causal, 0.3);
  variable_list results = torch::autograd::grad({(out * out).sum()}, inputs);
  results.push_back(out);
  return results;
}

void compare(const Case& c) {
  variable_list plain = {numbers({1, 4, c.rows, 40}, 0), numbers({1, 4, kKeys, 40}, 1),
                         numbers({1, 4, kKeys, c.features}, 2)};
  if (c.is_masked) plain.push_back(numbers({4, c.rows, kKeys}, 3));
  for (Tensor& t : plain) t.requires_grad_();
  const variable_list want = run(c, plain);
  for (const int64_t ranks : {1, 2, 3, 4}) {
    shardfield::run_in_process({ranks}, [&](const shardfield::Mesh& mesh) {
      variable_list mine;
      for (size_t i = 0; i < plain.size(); ++i) {
        const Tensor t = plain[i].detach();
        mine.push_back(
            (i < 3 ? shardfield::shard_tensor(t, mesh, {2}) : t.clone()).requires_grad_());
      }
      const variable_list got = run(c, mine);
      ASSERT_TRUE(shardfield::is_sharded(got.back()));
      for (size_t i = 0; i < want.size(); ++i) {
        const Tensor full = shardfield::full_tensor(got[i]).detach();
        EXPECT_TRUE(at::allclose(full, want[i].detach(), 1e-9, 1e-11)) << i << " on " << ranks;
      }
    });
  }
}

TEST(RingAttention, EqualsThePlainOp) {
  compare({300, 40, false, false});
  compare({300, 48, false, false});
  compare({kKeys, 40, true, false});
  compare({300, 48, true, false});
  compare({300, 40, false, true});
}

}  // namespace
