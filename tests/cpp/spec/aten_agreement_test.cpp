// The planners' own rules against the ATen ops they describe.
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "random_draws.h"

#include "shardfield/spec/adaptive.h"
#include "shardfield/spec/pad.h"
#include "shardfield/spec/range.h"
#include "shardfield/spec/window.h"

namespace shardfield::spec {
namespace {

at::Tensor row_numbers(int64_t rows) {
  return at::arange(rows, at::TensorOptions().dtype(at::kDouble)).reshape({1, 1, rows});
}

TEST(AgreesWithATen, ChunkSizes) {
  Draws draws;
  for (int i = 0; i < 300; ++i) {
    const int64_t rows = draws.in(1, 40);
    const int64_t parts = draws.in(1, 9);
    std::vector<int64_t> expected;
    for (const at::Tensor& chunk : at::zeros({rows}).chunk(parts)) {
      expected.push_back(chunk.size(0));
    }
    expected.resize(static_cast<size_t>(parts), 0);
    EXPECT_EQ(chunk_sizes(rows, parts), expected);
  }
}

TEST(AgreesWithATen, PoolingCountsInBothModes) {
  Draws draws;
  for (int i = 0; i < 1000; ++i) {
    Window window{draws.in(1, 5), draws.in(1, 4), draws.in(1, 3), 0, 0};
    window.pad_lo = window.pad_hi = draws.in(0, window.kernel / 2);
    const bool ceil_mode = draws.once_in(2);
    const int64_t rows = draws.in(window.extent(), window.extent() + 12);
    const at::Tensor pooled = at::max_pool1d(row_numbers(rows), window.kernel, window.stride,
                                             window.pad_lo, window.dilation, ceil_mode);
    EXPECT_EQ(num_outputs(rows, window, ceil_mode), pooled.size(2))
        << rows << " rows, kernel " << window.kernel << " stride " << window.stride << " pad "
        << window.pad_lo << " dilation " << window.dilation << " ceil " << ceil_mode;
  }
}

TEST(AgreesWithATen, TransposedCounts) {
  Draws draws;
  for (int i = 0; i < 300; ++i) {
    Window window{draws.in(1, 5), draws.in(1, 4), draws.in(1, 3), 0, 0};
    window.pad_lo = window.pad_hi = draws.in(0, window.extent() / 2);
    const int64_t extra = draws.in(0, std::max(window.stride, window.dilation) - 1);
    const int64_t rows = draws.in(2, 12);
    if (num_transposed_outputs(rows, window, extra) < 1) {
      continue;
    }
    const at::Tensor out =
        at::conv_transpose1d(row_numbers(rows), at::ones({1, 1, window.kernel}, at::kDouble), {},
                             window.stride, window.pad_lo, extra, 1, window.dilation);
    EXPECT_EQ(num_transposed_outputs(rows, window, extra), out.size(2));
  }
}

TEST(AgreesWithATen, AdaptiveWindows) {
  Draws draws;
  for (int i = 0; i < 300; ++i) {
    const int64_t rows = draws.in(1, 30);
    const int64_t outputs = draws.in(1, 30);
    const at::Tensor pooled = at::adaptive_avg_pool1d(row_numbers(rows), outputs);
    for (int64_t o = 0; o < outputs; ++o) {
      const Range window = adaptive_window(o, rows, outputs);
      const double mean = static_cast<double>(window.begin + window.end - 1) / 2;
      EXPECT_NEAR(pooled[0][0][o].item<double>(), mean, 1e-12) << rows << " to " << outputs;
    }
  }
}

TEST(AgreesWithATen, PaddedRows) {
  Draws draws;
  for (int i = 0; i < 500; ++i) {
    const int64_t rows = draws.in(2, 12);
    const int64_t mode = draws.in(0, 2);
    const int64_t most = mode == 0 ? rows - 1 : rows;
    const int64_t lo = draws.in(0, most);
    const int64_t hi = draws.in(0, most);
    const char* names[] = {"reflect", "replicate", "circular"};
    const PadMode modes[] = {PadMode::kReflect, PadMode::kReplicate, PadMode::kCircular};
    const at::Tensor padded = at::pad(row_numbers(rows), {lo, hi}, names[mode]);
    for (int64_t o = 0; o < padded.size(2); ++o) {
      EXPECT_EQ(pad_source(o, rows, lo, modes[mode]), padded[0][0][o].item<int64_t>());
    }
  }
}

}  // namespace
}  // namespace shardfield::spec
