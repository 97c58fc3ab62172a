#include "shardfield/spec/resample.h"

#include <cmath>
#include <stdexcept>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "moved_rows.h"
#include "random_draws.h"

namespace shardfield::spec {
namespace {

using Sizes = std::vector<int64_t>;

struct Case {
  int64_t rows = 1;
  int64_t outputs = 1;
  ResampleOptions options;
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << c.rows << " rows to " << c.outputs << " mode " << static_cast<int>(c.options.mode)
             << " align_corners " << c.options.align_corners << " antialias " << c.options.antialias
             << " scale " << c.options.scale_factor.value_or(-1) << " float "
             << c.options.single_precision;
}

bool is_nearest(const ResampleOptions& options) {
  return options.mode == ResampleMode::kNearest || options.mode == ResampleMode::kNearestExact;
}

Case draw_case(Draws& draws) {
  Case c;
  c.rows = draws.in(1, 40);
  c.options.mode = static_cast<ResampleMode>(draws.in(0, 3));
  if (!is_nearest(c.options)) {
    c.options.align_corners = draws.once_in(3);
    c.options.antialias = draws.once_in(3);
  }
  c.options.single_precision = draws.once_in(2);
  c.outputs = draws.in(1, draws.once_in(4) ? 160 : 60);
  if (draws.once_in(2)) {
    const double usual[] = {2, 0.5, 1.5, 3, 1, 1.05, 0.7, 0.25};
    const double factor =
        draws.once_in(2) ? usual[draws.in(0, 7)] : static_cast<double>(draws.in(20, 400)) / 100.0;
    c.outputs = resampled_size(c.rows, factor);
    if (c.outputs < 1) {
      return draw_case(draws);
    }
    c.options.scale_factor = factor;
  }
  return c;
}

/// (outputs, rows) matrix of the taps.
at::Tensor matrix_of(const Taps& taps) {
  at::Tensor matrix = at::zeros({taps.num_outputs, taps.num_rows}, at::kDouble);
  auto entries = matrix.accessor<double, 2>();
  for (int64_t o = 0; o < taps.num_outputs; ++o) {
    for (int64_t t = 0; t < taps.width; ++t) {
      const auto at = static_cast<size_t>(o * taps.width + t);
      entries[o][taps.index[at]] += taps.weights[at];
    }
  }
  return matrix;
}

/// Size of the dims that keep their size. (ATen's antialiased ops go wrong on a width of one.)
constexpr int64_t kOtherSize = 2;

/// One channel per row; channel r is one at row r only. (1, rows, rows[, 2[, 2]]).
at::Tensor unit_signals(const Case& c, int64_t num_dims, bool channels_last) {
  const auto type = c.options.single_precision ? at::kFloat : at::kDouble;
  Sizes shape{1, c.rows, c.rows};
  shape.resize(static_cast<size_t>(num_dims) + 2, 1);
  const at::Tensor eye = at::eye(c.rows, at::TensorOptions().dtype(type)).reshape(shape);
  std::fill(shape.begin() + 3, shape.end(), kOtherSize);
  if (!channels_last) {
    return eye.expand(shape).contiguous();
  }
  return eye.expand(shape).contiguous(num_dims == 2 ? at::MemoryFormat::ChannelsLast
                                                    : at::MemoryFormat::ChannelsLast3d);
}

/// (outputs, rows): what ATen makes of the unit signals.
at::Tensor aten_matrix(const Case& c, int64_t num_dims, bool channels_last) {
  const ResampleOptions& o = c.options;
  const at::Tensor x = unit_signals(c, num_dims, channels_last);
  Sizes size{c.outputs};
  size.resize(static_cast<size_t>(num_dims), kOtherSize);
  const std::optional<double> scale = o.scale_factor;
  at::Tensor y;
  if (o.mode == ResampleMode::kNearest) {
    y = num_dims == 1   ? at::upsample_nearest1d(x, size, scale)
        : num_dims == 2 ? at::upsample_nearest2d(x, size, scale, std::nullopt)
                        : at::upsample_nearest3d(x, size, scale, std::nullopt, std::nullopt);
  } else if (o.mode == ResampleMode::kNearestExact) {
    y = num_dims == 1   ? at::_upsample_nearest_exact1d(x, size, scale)
        : num_dims == 2 ? at::_upsample_nearest_exact2d(x, size, scale, std::nullopt)
                        : at::_upsample_nearest_exact3d(x, size, scale, std::nullopt, std::nullopt);
  } else if (o.mode == ResampleMode::kCubic) {
    y = o.antialias ? at::_upsample_bicubic2d_aa(x, size, o.align_corners, scale, std::nullopt)
                    : at::upsample_bicubic2d(x, size, o.align_corners, scale, std::nullopt);
  } else if (o.antialias) {
    y = at::_upsample_bilinear2d_aa(x, size, o.align_corners, scale, std::nullopt);
  } else {
    y = num_dims == 1 ? at::upsample_linear1d(x, size, o.align_corners, scale)
        : num_dims == 2
            ? at::upsample_bilinear2d(x, size, o.align_corners, scale, std::nullopt)
            : at::upsample_trilinear3d(x, size, o.align_corners, scale, std::nullopt, std::nullopt);
  }
  for (int64_t dim = num_dims; dim > 1; --dim) {
    y = y.select(-1, 0);
  }
  return y[0].t().to(at::kDouble);
}

TEST(ResampleTaps, AreWhatATenComputes) {
  Draws draws;
  for (int i = 0; i < 3000; ++i) {
    Case c = draw_case(draws);
    const bool only_2d = c.options.mode == ResampleMode::kCubic || c.options.antialias;
    const int64_t num_dims = only_2d ? 2 : draws.in(1, 3);
    const bool channels_last = num_dims > 1 && draws.once_in(2);
    Sizes outputs{c.outputs};
    outputs.resize(static_cast<size_t>(num_dims), kOtherSize);
    c.options.float_nearest = uses_float_nearest(outputs, c.rows, channels_last);
    const at::Tensor expected = aten_matrix(c, num_dims, channels_last);
    const at::Tensor actual = matrix_of(resample_taps(c.rows, c.outputs, c.options));
    const double worst = (expected - actual).abs().max().item<double>();
    EXPECT_LE(worst, c.options.single_precision ? 2e-5 : 1e-12) << c << ", dims " << num_dims;
  }
}

TEST(ResampleTaps, FloatNearestIsWhatATenBackwardUses) {
  Draws draws;
  for (int i = 0; i < 500; ++i) {
    Case c = draw_case(draws);
    c.options.mode = draws.once_in(2) ? ResampleMode::kNearest : ResampleMode::kNearestExact;
    c.options.single_precision = false;
    c.options.float_nearest = true;
    const at::Tensor grad = at::eye(c.outputs, at::TensorOptions().dtype(at::kDouble)).unsqueeze(0);
    const Sizes size{c.outputs};
    const Sizes shape{1, c.outputs, c.rows};
    const auto scale = c.options.scale_factor;
    const at::Tensor back = c.options.mode == ResampleMode::kNearest
                                ? at::upsample_nearest1d_backward(grad, size, shape, scale)
                                : at::_upsample_nearest_exact1d_backward(grad, size, shape, scale);
    EXPECT_TRUE(at::equal(back[0], matrix_of(resample_taps(c.rows, c.outputs, c.options)))) << c;
  }
}

TEST(ResampleTaps, WorkedExample) {
  const Taps taps = resample_taps(2, 4, {.mode = ResampleMode::kLinear});
  EXPECT_EQ(taps.index, (Sizes{0, 1, 0, 1, 0, 1, 1, 1}));
  EXPECT_EQ(taps.weights, (std::vector<double>{1, 0, .75, .25, .25, .75, .75, .25}));
  EXPECT_EQ(taps.reach({0, 1}), (Range{0, 2}));
  EXPECT_EQ(resampled_size(5, 1.5), 7);
  EXPECT_THROW((void)resample_taps(0, 4, {}), std::invalid_argument);
}

TEST(ResampleTaps, ExactMultiplesDifferInFloat) {
  ResampleOptions options;
  EXPECT_EQ(resample_taps(49, 21, options).index[3], 7);
  options.float_nearest = true;
  const at::Tensor grad = at::zeros({1, 1, 21}, at::kDouble);
  grad[0][0][3] = 1;
  const at::Tensor back = at::upsample_nearest1d_backward(grad, {21}, {1, 1, 49}, std::nullopt);
  EXPECT_EQ(resample_taps(49, 21, options).index[3], back.argmax().item<int64_t>());
}

TEST(PlanResample, OutputsArePartitionedAndTheirRowsNeeded) {
  Draws draws;
  for (int i = 0; i < 2000; ++i) {
    Sizes sizes = draws.sizes(draws.in(1, 5), 0, 9);
    sizes.back() += 1;
    Case c = draw_case(draws);
    c.rows = total_of(sizes);
    c.outputs = draws.in(1, 60);
    const Taps taps = resample_taps(c.rows, c.outputs, c.options);
    const auto pieces = plan_resample(sizes, taps);
    int64_t next = 0;
    for (size_t rank = 0; rank < pieces.size(); ++rank) {
      EXPECT_EQ(pieces[rank].outputs.begin, next) << c;
      next = pieces[rank].outputs.end;
      if (sizes[rank] == 0) {
        EXPECT_TRUE(pieces[rank].outputs.empty()) << c;
      }
      for (int64_t o = pieces[rank].outputs.begin; o < next; ++o) {
        for (int64_t t = 0; t < taps.width; ++t) {
          EXPECT_TRUE(
              pieces[rank].inputs.contains(taps.index[static_cast<size_t>(o * taps.width + t)]))
              << c;
        }
      }
    }
    EXPECT_EQ(next, c.outputs) << c;
  }
}

TEST(PlanResample, IntegerFactorsKeepPiecesInStep) {
  const Sizes sizes{3, 5, 0, 4};
  const auto nearest = plan_resample(sizes, resample_taps(12, 24, {}));
  const auto owned = ranges_of(sizes);
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    EXPECT_EQ(nearest[rank].outputs.end, 2 * owned[rank].end);
  }
  EXPECT_EQ(moved(sizes, nearest), 0);
  const Sizes halves{2, 2};
  const auto linear = plan_resample(halves, resample_taps(4, 8, {.mode = ResampleMode::kLinear}));
  EXPECT_EQ(linear[0], (MappedPiece{{0, 4}, {0, 3}}));
  EXPECT_EQ(linear[1], (MappedPiece{{4, 8}, {1, 4}}));
  const Sizes wrong{2, 3};
  EXPECT_THROW((void)plan_resample(wrong, resample_taps(4, 8, {})), std::invalid_argument);
}

}  // namespace
}  // namespace shardfield::spec
