#include "shardfield/comm/failure.h"

#include <csignal>

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "shardfield/comm/check_level.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/in_process.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {
namespace {

using spec::Mesh;

std::string error_of(const std::function<void()>& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "no error";
}

bool has(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

/// Every transfer compared, for the length of a scope.
struct FullChecks {
  FullChecks() { set_check_level(CheckLevel::kFull); }
  ~FullChecks() { set_check_level(CheckLevel::kCheap); }
};

using SignalHandler = void (*)(int);

/// What SIGPIPE does after groups were made under `before`.
SignalHandler handler_after(SignalHandler before) {
  std::signal(SIGPIPE, before);
  run_in_process({2}, [](const Mesh&) {}, std::chrono::seconds(30));
  return std::signal(SIGPIPE, SIG_DFL);
}

TEST(Failure, AClosedConnectionDoesNotEndTheProcess) {
  EXPECT_EQ(handler_after(SIG_DFL), SIG_IGN);
  const SignalHandler own = [](int) {};
  EXPECT_EQ(handler_after(own), own);
  std::signal(SIGPIPE, SIG_IGN);
}

TEST(Failure, OtherCallsAreNamedAtLevelFull) {
  const FullChecks checks;
  run_in_process(
      {3},
      [](const Mesh& mesh) {
        const bool last = mesh.rank == 2;
        const std::string shape =
            error_of([&] { all_reduce(at::ones({last ? 3 : 2}), mesh, {0}); });
        EXPECT_TRUE(has(shape, "the ranks do not agree, on rank ")) << shape;
        EXPECT_TRUE(has(shape, "rank 0: sum over ranks in a direct call: Float [2]")) << shape;
        EXPECT_TRUE(has(shape, "rank 2: sum over ranks in a direct call: Float [3]")) << shape;
        const std::string kind = error_of([&] {
          const OpScope scope(last ? "amax" : "sum");
          all_reduce(at::ones({2}), mesh, {0}, last ? Reduction::kMax : Reduction::kSum);
        });
        EXPECT_TRUE(has(kind, "rank 1: sum over ranks in sum")) << kind;
        EXPECT_TRUE(has(kind, "rank 2: maximum over ranks in amax")) << kind;
        EXPECT_EQ(all_reduce(at::ones({1}), mesh, {0}).item<float>(), 3);
      },
      std::chrono::seconds(20));
}

TEST(Failure, MessagesThatDoNotFitAreNamedAtLevelFull) {
  const FullChecks checks;
  run_in_process(
      {2},
      [](const Mesh& mesh) {
        const int64_t rows = mesh.rank == 0 ? 2 : 3;
        const std::string text = error_of([&] {
          start_exchange(mesh, {{1 - mesh.rank, at::ones({rows})}},
                         {{1 - mesh.rank, at::empty({2})}})
              .wait();
        });
        EXPECT_TRUE(has(text, "rank 0: messages in exchange: Float, 8 bytes to rank 1")) << text;
        EXPECT_TRUE(has(text, "rank 1: messages in exchange: Float, 12 bytes to rank 0")) << text;
      },
      std::chrono::seconds(20));
}

TEST(Failure, ARankThatThrowsEndsTheOthersAndAGroupCanBeMadeAnew) {
  for (int attempt = 0; attempt < 3; ++attempt) {
    std::vector<std::string> told(3);
    const auto began = std::chrono::steady_clock::now();
    const std::string first = error_of([&] {
      run_in_process(
          {3},
          [&](const Mesh& mesh) {
            if (mesh.rank == 1) throw std::runtime_error("out of memory, say");
            const OpScope scope("conv2d");
            set_current_layer(intern_layer("decoder.conv"));
            told[static_cast<size_t>(mesh.rank)] =
                error_of([&] { all_reduce(at::ones({2}), mesh, {0}); });
            set_current_layer(0);
          },
          std::chrono::seconds(20));
    });
    EXPECT_EQ(first, "rank 1: out of memory, say");
    EXPECT_LT(std::chrono::steady_clock::now() - began, std::chrono::seconds(10))
        << "the others wait for the timeout instead of seeing the connections close";
    for (const int rank : {0, 2})
      EXPECT_TRUE(has(told[static_cast<size_t>(rank)],
                      "conv2d on rank " + std::to_string(rank) +
                          " of 3 in layer 'decoder.conv': a peer failed, left"))
          << told[static_cast<size_t>(rank)];
  }
  run_in_process({3}, [](const Mesh& mesh) {
    EXPECT_EQ(all_reduce(at::ones({1}), mesh, {0}).item<float>(), 3);
  });
}

TEST(Failure, NotesOfTheProgramAreInTheText) {
  set_failure_notes([](const std::string& call, const std::string&) { return "Notes on " + call; });
  const std::string text = error_of([] { throw_failed("sum on rank 0 of 2", "gone"); });
  set_failure_notes({});
  EXPECT_TRUE(has(text, "sum on rank 0 of 2: a peer failed")) << text;
  EXPECT_TRUE(has(text, ". Notes on sum on rank 0 of 2")) << text;
}

}  // namespace
}  // namespace shardfield::comm
