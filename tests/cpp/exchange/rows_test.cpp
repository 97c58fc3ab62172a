#include "shardfield/exchange/rows.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/comm/in_process.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::exchange {
namespace {

constexpr auto kTimeout = std::chrono::seconds(20);
using spec::Segment;
using Wanted = std::vector<std::vector<Segment>>;

/// <H x, y> == <x, H^T y> summed over ranks, for random x and y.
void dot_test(const std::vector<int64_t>& sizes, const Wanted& wanted) {
  comm::run_in_process(
      {static_cast<int64_t>(sizes.size())},
      [&](const spec::Mesh& mesh) {
        const auto* layout = spec::intern_layout(mesh, {{1, {0}, sizes}});
        const RowExchange exchange(*layout, 0, wanted);
        at::manual_seed(7);
        auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + mesh.rank);
        const at::Tensor x = at::randn({2, sizes[mesh.rank], 3}, generator, at::kDouble);
        const at::Tensor y = at::randn({2, exchange.wanted_rows(), 3}, generator, at::kDouble);
        const at::Tensor left = comm::all_reduce((exchange.forward(x) * y).sum(), mesh, {0});
        const at::Tensor right = comm::all_reduce((x * exchange.adjoint(y)).sum(), mesh, {0});
        EXPECT_NEAR(left.item<double>(), right.item<double>(), 1e-12 * 100);
      },
      kTimeout);
}

TEST(RowExchange, AdjointPassesTheDotTest) {                             // case E3
  dot_test({2, 2, 2}, {{{0, 3, 1}}, {{1, 4, 1}}, {{3, 3, 1}}});          // width 1
  dot_test({2, 2, 2}, {{{0, 6, 1}}, {{0, 6, 1}}, {{0, 6, 1}}});          // several ranks deep
  dot_test({3, 0, 3}, {{{0, 4, 1}}, {{2, 2, 1}}, {{2, 4, 1}}});          // an empty piece
  dot_test({3, 2}, {{{4, 3, -1}}, {{1, 2, -1}}});                        // flip
  dot_test({4, 4}, {{{7, 1, 1}, {0, 5, 1}}, {{3, 5, 1}, {0, 1, 1}}});    // periodic
  dot_test({4, 4}, {{{2, 2, -1}, {0, 5, 1}}, {{3, 5, 1}, {6, 2, -1}}});  // reflect
  dot_test({4, 4}, {{{0, 3, 0}, {0, 4, 1}}, {{4, 4, 1}, {7, 3, 0}}});    // replicate
}

TEST(RowExchange, HaloOfOnesAndItsTranspose) {
  comm::run_in_process(
      {3},
      [](const spec::Mesh& mesh) {
        const auto* layout = spec::intern_layout(mesh, {{0, {0}, {2, 2, 2}}});
        const RowExchange halo(*layout, 0, {{{0, 3, 1}}, {{1, 4, 1}}, {{3, 3, 1}}});
        const at::Tensor held = halo.forward(at::ones({2}, at::kDouble));
        EXPECT_EQ(comm::all_reduce(held.sum(), mesh, {0}).item<double>(), 10.);
        const at::Tensor back = halo.adjoint(at::ones({halo.wanted_rows()}, at::kDouble));
        const at::Tensor expected =
            at::tensor({1., 2., 2., 2., 2., 1.}, at::kDouble).narrow(0, 2 * mesh.rank, 2);
        EXPECT_TRUE(at::equal(back, expected));
      },
      kTimeout);
}

TEST(RowExchange, SecondDerivative) {
  comm::run_in_process(
      {2},
      [](const spec::Mesh& mesh) {
        const auto* layout = spec::intern_layout(mesh, {{0, {0}, {3, 2}}});
        const at::Tensor full = at::arange(1., 6., at::kDouble);
        at::Tensor serial = full.clone().requires_grad_(true);
        at::Tensor x = full.narrow(0, layout->local_offset(0), layout->local_size(0))
                           .clone()
                           .requires_grad_(true);
        // Each rank sees all rows: sum over ranks of (sum x)^3 has gradient 2 * 3 (sum x)^2.
        auto exchange = row_exchange(*layout, 0, Wanted{{{0, 5, 1}}, {{0, 5, 1}}});
        const at::Tensor value = exchange_rows(x, exchange).sum().pow(3);
        const auto grad = torch::autograd::grad({value}, {x}, {}, true, true)[0];
        const at::Tensor reference = 2 * serial.sum().pow(3);
        const auto reference_grad = torch::autograd::grad({reference}, {serial}, {}, true, true)[0];
        grad.pow(2).sum().backward();
        reference_grad.pow(2).sum().backward();
        const at::Tensor expected =
            serial.grad().narrow(0, layout->local_offset(0), layout->local_size(0));
        EXPECT_TRUE(at::allclose(x.grad(), expected, 1e-12));
      },
      kTimeout);
}

}  // namespace
}  // namespace shardfield::exchange
