#include "shardfield/comm/gradient_law.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/comm/fused_all_reduce.h"
#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/in_process.h"

namespace shardfield::comm {
namespace {

constexpr auto kTimeout = std::chrono::seconds(20);
using spec::Mesh;

/// A replicated value that enters a rank's own computation: its gradient is
/// summed over axis 1.
struct Enter : torch::autograd::Function<Enter> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            int64_t mesh) {
    ctx->saved_data["mesh"] = mesh;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list grads) {
    const auto* mesh = reinterpret_cast<const Mesh*>(ctx->saved_data["mesh"].toInt());
    return {all_reduce(grads[0], *mesh, {1}), at::Tensor()};
  }
};

at::Tensor with_gradient(const Mesh& mesh) {
  at::Tensor weight = at::ones({3}, at::kDouble).requires_grad_();
  const at::Tensor used =
      Enter::apply(weight.to(at::kFloat).to(at::kDouble), reinterpret_cast<int64_t>(&mesh));
  (used * (mesh.rank + 1.0)).sum().backward();
  return weight;
}

TEST(GradientLaw, ASumOverTheDomainIsRememberedBehindCasts) {
  run_in_process(
      {2, 2},
      [](const Mesh& mesh) {
        const at::Tensor weight = with_gradient(mesh);
        const auto sum = gradient_sum_of(weight.grad());
        ASSERT_TRUE(sum.has_value());
        EXPECT_EQ(sum->axes, std::vector<int>{1});
        EXPECT_TRUE(is_equal_over_domain(weight.grad(), *sum));
        EXPECT_FALSE(gradient_sum_of(weight.grad().clone()).has_value());
        EXPECT_FALSE(is_equal_over_domain(at::full({1}, mesh.rank), *sum));
        EXPECT_FALSE(is_equal_over_domain(at::zeros({1}), *sum));
      },
      kTimeout);
}

TEST(GradientLaw, ASecondSumIsRefusedOverTheDomainAlone) {
  run_in_process(
      {2, 2},
      [](const Mesh& mesh) {
        const GroupMesh& groups = groups_of(mesh);
        const at::Tensor weight = with_gradient(mesh);
        check_summed_once(weight.grad(), *groups.axis[0].backend("test"),
                          "test");  // data axis
        for (const Comm* group : {&groups.axis[1], &groups.whole}) {
          try {
            check_summed_once(weight.grad(), *group->backend("test"), "test");
            ADD_FAILURE() << "not refused over " << group->name();
          } catch (const c10::Error& error) {
            EXPECT_NE(std::string(error.what()).find("2 times too large"), std::string::npos);
          }
        }
        EXPECT_THROW(fused_all_reduce({weight.grad()}, mesh), c10::Error);
        const auto mean = fused_all_reduce({weight.grad()}, mesh, Reduction::kSum, true);
        EXPECT_TRUE(mean[0].allclose(at::full({3}, 5., at::kDouble)));  // of 1 + 2 and 3 + 4
      },
      kTimeout);
}

TEST(GradientLaw, SumsOutsideOfBackwardAreNotGradients) {
  run_in_process(
      {1, 2},
      [](const Mesh& mesh) {
        EXPECT_FALSE(gradient_sum_of(all_reduce(at::ones({2}), mesh, {1})).has_value());
      },
      kTimeout);
}

}  // namespace
}  // namespace shardfield::comm
