#include "shardfield/comm/collectives.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/in_process.h"

namespace shardfield::comm {
namespace {

constexpr auto kTimeout = std::chrono::seconds(20);
using spec::Mesh;

TEST(AllReduce, StridedInput) {  // case J1
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        const at::Tensor strided = at::arange(6, at::kDouble).slice(0, 0, 6, 2);
        EXPECT_TRUE(
            at::equal(all_reduce(strided, mesh, {0}), at::tensor({0., 4., 8.}, at::kDouble)));
      },
      kTimeout);
}

TEST(AllReduce, LazyConjugateAndNegativeBits) {  // case J17
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        const at::Tensor z = at::complex(at::tensor({1., 3.}), at::tensor({2., 4.}));
        const at::Tensor sum = all_reduce(z.conj(), mesh, {0});
        EXPECT_TRUE(at::equal(at::real(sum), at::tensor({2., 6.})));
        EXPECT_TRUE(at::equal(at::imag(sum), at::tensor({-4., -8.})));
        EXPECT_TRUE(at::equal(all_reduce(at::imag(z.conj()), mesh, {0}), at::tensor({-4., -8.})));
        EXPECT_THROW(all_reduce(z, mesh, {0}, Reduction::kMax), c10::Error);
      },
      kTimeout);
}

TEST(AllReduce, NanWinsOnEveryRank) {
  run_in_process(
      {3},
      [](const Mesh& mesh) {
        for (int holder = 0; holder < 3; ++holder) {
          for (const Reduction reduction : {Reduction::kMax, Reduction::kMin}) {
            at::Tensor value = at::tensor({1. + mesh.rank, -1.}, at::kDouble);
            if (mesh.rank == holder) value[1] = std::numeric_limits<double>::quiet_NaN();
            const at::Tensor out = all_reduce(value, mesh, {0}, reduction);
            EXPECT_EQ(out[0].item<double>(), reduction == Reduction::kMax ? 3. : 1.);
            EXPECT_TRUE(std::isnan(out[1].item<double>()));
          }
        }
      },
      kTimeout);
}

TEST(AllReduce, OneAxisOfTwoAndBools) {
  run_in_process(
      {2, 2},
      [](const Mesh& mesh) {
        const at::Tensor rank = at::full({1}, mesh.rank, at::kLong);
        EXPECT_EQ(all_reduce(rank, mesh, {0}).item<int64_t>(), 2 * mesh.coord[1] + 2);
        EXPECT_EQ(all_reduce(rank, mesh, {1}).item<int64_t>(), 4 * mesh.coord[0] + 1);
        EXPECT_EQ(all_reduce(rank, mesh, {0, 1}).item<int64_t>(), 6);
        EXPECT_TRUE(all_reduce(rank == 2, mesh, {0, 1}, Reduction::kMax).item<bool>());
      },
      kTimeout);
}

TEST(AllReduce, LeavesItsInputAlone) {  // cases P6, F19
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        const at::Tensor value = at::ones({3}, at::kDouble);
        const at::Tensor sum = all_reduce(value, mesh, {0});
        EXPECT_TRUE(at::equal(value, at::ones({3}, at::kDouble)));
        EXPECT_TRUE(at::equal(sum, at::full({3}, 2., at::kDouble)));
      },
      kTimeout);
}

TEST(Exchange, ComplexAndEmptyMessages) {  // cases J3, P5
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        const int peer = 1 - mesh.rank;
        at::Tensor in = at::zeros({2}, at::kComplexDouble);
        std::vector<Message> sends, recvs;
        if (mesh.rank == 0)
          sends.push_back({peer, at::full({2}, c10::complex<double>(1, 2), at::kComplexDouble)});
        if (mesh.rank == 1) recvs.push_back({peer, in});
        sends.push_back({peer, at::empty({0})});
        recvs.push_back({peer, at::empty({0})});
        start_exchange(mesh, sends, recvs).wait();
        if (mesh.rank == 1) {
          EXPECT_EQ(in[1].item<c10::complex<double>>(), (c10::complex<double>(1, 2)));
        }
      },
      kTimeout);
}

TEST(InProcess, AThrowingRankIsNamedAndTheOthersEnd) {
  const auto start = std::chrono::steady_clock::now();
  try {
    run_in_process(
        {3},
        [](const Mesh& mesh) {
          TORCH_CHECK(mesh.rank != 1, "the cause");
          all_reduce(at::ones({4}), mesh, {0});
        },
        kTimeout);
    FAIL() << "no error";
  } catch (const std::exception& error) {
    EXPECT_NE(std::string(error.what()).find("rank"), std::string::npos);
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, kTimeout + std::chrono::seconds(5));
}

TEST(Mesh, AGroupThatIsGoneIsAnError) {
  const Mesh* kept = nullptr;
  run_in_process({1}, [&](const Mesh& mesh) { kept = &mesh; }, kTimeout);
  EXPECT_THROW(groups_of(*kept).whole.backend("op"), c10::Error);
}

}  // namespace
}  // namespace shardfield::comm
