// Rules for the ops of another library, registered from outside: this program only links
// Shardfield.

#include "shardfield/dispatch/extension.h"

#include <atomic>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/shardfield.h"

namespace {

using at::Tensor;
using torch::autograd::AutogradContext;
using torch::autograd::grad;
using torch::autograd::variable_list;

/// x (rows, columns) damped by the columns' weights w: x exp(-w), with its own derivative formula.
Tensor damp_kernel(const Tensor& x, const Tensor& w) {
  return x * at::exp(-w);
}

Tensor damp(const Tensor& x, const Tensor& w) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("extension_test::damp", "")
                             .typed<Tensor(const Tensor&, const Tensor&)>();
  return op.call(x, w);
}

struct Damp : torch::autograd::Function<Damp> {
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& w) {
    ctx->save_for_backward({x, w});
    const at::AutoDispatchBelowADInplaceOrView below;
    return damp(x, w);
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor damped = damp(grads[0], saved[1]);
    return {damped, -(damped * saved[0]).sum(0)};
  }
};

Tensor damp_autograd(const Tensor& x, const Tensor& w) {
  return Damp::apply(x, w);
}

std::atomic<int> calls_on_pieces{0};

/// The rule below the formula: rows are independent, w is whole on every rank.
Tensor sharded_damp(const Tensor& x, const Tensor& w) {
  ++calls_on_pieces;
  return shardfield::tensor::wrap(damp(shardfield::tensor::local(x), w),
                                  &shardfield::tensor::layout_of(x), x.sizes());
}

struct Results {
  Tensor output;
  variable_list first, second;
};

Results run(const Tensor& x, const Tensor& w) {
  const variable_list inputs{x.detach().requires_grad_(), w.detach().requires_grad_()};
  Results r;
  r.output = damp(inputs[0], inputs[1]);
  r.first = grad({(r.output * r.output).sum()}, inputs, {}, std::nullopt, /*create_graph=*/true);
  r.second = grad({(r.first[0] * r.first[0]).sum() + (r.first[1] * r.first[1]).sum()}, inputs);
  return r;
}

void expect_same(const Tensor& got, const Tensor& want, const char* what) {
  const Tensor full = shardfield::full_tensor(got).detach();
  ASSERT_EQ(full.sizes(), want.sizes()) << what;
  EXPECT_TRUE(at::allclose(full, want, 1e-12, 1e-13)) << what;
}

TORCH_LIBRARY(extension_test, m) {
  m.def("damp(Tensor x, Tensor w) -> Tensor");
}
TORCH_LIBRARY_IMPL(extension_test, CPU, m) {
  m.impl("damp", damp_kernel);
}
TORCH_LIBRARY_IMPL(extension_test, Autograd, m) {
  m.impl("damp", damp_autograd);
}
SHARDFIELD_EXTENSION(extension_test, ops) {
  ops.backend("damp", TORCH_FN(sharded_damp));
}

TEST(Extension, KernelBelowItsOwnFormula) {
  const Tensor x = at::sin(at::arange(28, at::kDouble)).reshape({7, 4});
  const Tensor w = at::cos(at::arange(4, at::kDouble));
  const Results want = run(x, w);
  for (const std::vector<int64_t>& shape :
       std::vector<std::vector<int64_t>>{{1}, {2}, {3}, {4}, {2, 2}}) {
    shardfield::run_in_process(shape, [&](const shardfield::Mesh& mesh) {
      std::vector<int> dims(shape.size(), -1);
      dims.back() = 0;
      const Results got = run(shardfield::shard_tensor(x, mesh, dims), w);
      EXPECT_TRUE(shardfield::is_sharded(got.output));
      EXPECT_FALSE(shardfield::is_sharded(got.first[1]));
      expect_same(got.output, want.output, "output");
      for (size_t i = 0; i < 2; ++i) {
        expect_same(got.first[i], want.first[i], "gradient");
        expect_same(got.second[i], want.second[i], "second gradient");
      }
      EXPECT_GT(calls_on_pieces, 0);
    });
  }
}

Tensor always_seven(const Tensor&, const Tensor&) {
  return at::full({}, 7.0, at::kDouble);
}

TEST(Extension, ReplacesARuleAsLongAsItLives) {
  const Tensor x = at::arange(5, at::kDouble);
  const auto dots = [&] {
    double dot = 0;
    shardfield::run_in_process({2}, [&](const shardfield::Mesh& mesh) {
      const Tensor s = shardfield::shard_tensor(x, mesh, {0});
      const double value = at::dot(s, s).item<double>();
      if (mesh.rank == 0) dot = value;
    });
    return dot;
  };
  EXPECT_EQ(dots(), 30.0);
  {
    shardfield::dispatch::Extension extension("aten");
    extension.composed("dot", TORCH_FN(always_seven));
    EXPECT_EQ(dots(), 7.0);
  }
  EXPECT_EQ(dots(), 30.0);
}

}  // namespace
