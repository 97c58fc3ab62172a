#include <set>
#include <utility>

#include <gtest/gtest.h>

#include "moved_rows.h"
#include "random_draws.h"

#include "shardfield/spec/integer.h"
#include "shardfield/spec/window.h"

namespace shardfield::spec {
namespace {

using Sizes = std::vector<int64_t>;

struct Case {
  Sizes sizes;
  Window window;
  int64_t output_padding = 0;

  [[nodiscard]] int64_t rows() const { return total_of(sizes); }
  [[nodiscard]] int64_t outputs() const {
    return num_transposed_outputs(rows(), window, output_padding);
  }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "sizes " << join(c.sizes) << " kernel " << c.window.kernel << " stride "
             << c.window.stride << " dilation " << c.window.dilation << " pad " << c.window.pad_lo
             << " output_padding " << c.output_padding;
}

Case draw_case(Draws& draws, int64_t smallest, int64_t largest) {
  Case c;
  c.sizes = draws.sizes(draws.in(1, 6), smallest, largest);
  c.window.kernel = draws.in(1, 6);
  c.window.stride = draws.in(1, 5);
  c.window.dilation = draws.in(1, 3);
  c.window.pad_lo = c.window.pad_hi = draws.in(0, c.window.extent() + 1);
  c.output_padding = draws.in(0, std::max(c.window.stride, c.window.dilation) - 1);
  return c;
}

/// Which (row, tap) pairs add to which output: rows `inputs`, first output at `origin`.
using Contributions = std::set<std::pair<int64_t, int64_t>>;

Contributions contributions(const Case& c, Range inputs, int64_t output) {
  Contributions found;
  for (int64_t row = inputs.begin; row < inputs.end; ++row) {
    for (int64_t tap = 0; tap < c.window.kernel; ++tap) {
      if (row * c.window.stride - c.window.pad_lo + tap * c.window.dilation == output) {
        found.insert({row, tap});
      }
    }
  }
  return found;
}

void expect_piece_computes_its_outputs(const Case& c, const TransposedPiece& piece) {
  const Window& w = c.window;
  const int64_t local_length =
      piece.inputs.empty() ? 0 : (piece.inputs.size() - 1) * w.stride + w.extent();
  const int64_t kept = local_length - piece.crop_lo - piece.crop_hi;
  EXPECT_GE(kept, 0) << c;
  EXPECT_EQ(piece.pad_lo + kept + piece.pad_hi, piece.outputs.size()) << c;
  const int64_t origin = piece.inputs.begin * w.stride - w.pad_lo;  // Of the local output.
  for (int64_t o = piece.outputs.begin; o < piece.outputs.end; ++o) {
    const Contributions all = contributions(c, {0, c.rows()}, o);
    const int64_t at = o - piece.outputs.begin - piece.pad_lo;  // Among the kept local rows.
    if (at < 0 || at >= kept) {
      EXPECT_TRUE(all.empty()) << c << " output " << o;
      continue;
    }
    EXPECT_EQ(origin + piece.crop_lo + at, o) << c;
    EXPECT_EQ(contributions(c, piece.inputs, o), all) << c << " output " << o;
  }
}

TEST(PlanTransposedWindow, PiecesComputeExactlyTheirOutputs) {
  Draws draws;
  for (int i = 0; i < 2000; ++i) {
    const Case c = draw_case(draws, 0, draws.once_in(2) ? 2 : 10);
    const auto pieces = plan_transposed_window(c.sizes, c.window, c.output_padding);
    ASSERT_EQ(pieces.size(), c.sizes.size());
    int64_t next = 0;
    for (size_t rank = 0; rank < pieces.size(); ++rank) {
      EXPECT_EQ(pieces[rank].outputs.begin, next) << c;
      next = pieces[rank].outputs.end;
      if (c.sizes[rank] == 0 && c.rows() > 0) {
        EXPECT_TRUE(pieces[rank].outputs.empty()) << c;
      }
      expect_piece_computes_its_outputs(c, pieces[rank]);
    }
    EXPECT_EQ(next, c.outputs()) << c;
  }
}

/// Fewest rows over the border at `row` among all output borders.
int64_t fewest_over_border(const Case& c, int64_t row) {
  const Window& w = c.window;
  int64_t fewest = c.rows();
  for (int64_t border = 0; border <= c.outputs(); ++border) {
    const int64_t last = border == 0 ? -1 : floor_div(border - 1 + w.pad_lo, w.stride);
    const int64_t first =
        border == c.outputs() ? c.rows() : ceil_div(border + w.pad_lo - w.extent() + 1, w.stride);
    const int64_t right = std::max<int64_t>(std::min(last + 1, c.rows()) - row, 0);
    const int64_t left = std::max<int64_t>(row - std::max<int64_t>(first, 0), 0);
    fewest = std::min(fewest, left + right);
  }
  return fewest;
}

TEST(PlanTransposedWindow, MovesAsFewRowsAsAnyPlacement) {
  Draws draws;
  for (int i = 0; i < 2000; ++i) {
    Case c = draw_case(draws, 0, 0);
    c.window.pad_lo = c.window.pad_hi = draws.in(0, c.window.extent() - 1);
    const int64_t thick = 3 * c.window.extent();
    c.sizes = draws.sizes(draws.in(2, 5), thick, thick + 9);
    int64_t fewest = 0;
    for (size_t rank = 1; rank < c.sizes.size(); ++rank) {
      fewest += fewest_over_border(c, ranges_of(c.sizes)[rank].begin);
    }
    const auto pieces = plan_transposed_window(c.sizes, c.window, c.output_padding);
    EXPECT_EQ(moved(c.sizes, pieces), fewest) << c;
    const auto borders = static_cast<int64_t>(c.sizes.size()) - 1;
    EXPECT_EQ(fewest, borders * floor_div(c.window.extent() - 1, c.window.stride)) << c;
  }
}

TEST(PlanTransposedWindow, WorkedExamples) {
  const Sizes sizes{2, 2};
  const auto doubled = plan_transposed_window(sizes, {.kernel = 2, .stride = 2});
  EXPECT_EQ(doubled[0], (TransposedPiece{{0, 4}, {0, 2}, 0, 0, 0, 0}));
  EXPECT_EQ(doubled[1], (TransposedPiece{{4, 8}, {2, 4}, 0, 0, 0, 0}));
  EXPECT_EQ(moved(sizes, doubled), 0);
  const Window usual{.kernel = 3, .stride = 2, .pad_lo = 1, .pad_hi = 1};
  const auto padded = plan_transposed_window(sizes, usual, 1);
  EXPECT_EQ(padded[0], (TransposedPiece{{0, 4}, {0, 3}, 1, 2, 0, 0}));
  EXPECT_EQ(padded[1], (TransposedPiece{{4, 8}, {2, 4}, 1, 0, 0, 0}));
  EXPECT_EQ(moved(sizes, padded), 1);
}

TEST(PlanTransposedWindow, OutputPaddingBeyondTheLastTapIsZeros) {
  const Sizes sizes{2, 1};
  const auto pieces = plan_transposed_window(sizes, {.kernel = 1, .stride = 3}, 2);
  EXPECT_EQ(num_transposed_outputs(3, {.kernel = 1, .stride = 3}, 2), 9);
  EXPECT_EQ(pieces[0], (TransposedPiece{{0, 6}, {0, 2}, 0, 0, 0, 2}));
  EXPECT_EQ(pieces[1], (TransposedPiece{{6, 9}, {2, 3}, 0, 0, 0, 2}));
}

TEST(PlanWindowGradient, EveryRankGetsAllThatReachesItsRows) {
  Draws draws;
  for (int i = 0; i < 1000; ++i) {
    // The adjoint: rows of the forward window are outputs of the transposed one.
    const Case c = draw_case(draws, 0, 8);
    const int64_t num_outputs = draws.in(0, 20);
    const Case adjoint{{num_outputs}, c.window, 0};
    const auto pieces = plan_window_gradient(c.sizes, c.window, num_outputs);
    const auto owned = ranges_of(c.sizes);
    for (size_t rank = 0; rank < pieces.size(); ++rank) {
      EXPECT_EQ(pieces[rank].outputs.size(), owned[rank].size());
      expect_piece_computes_its_outputs(adjoint, pieces[rank]);
    }
  }
}

TEST(PlanWindowGradient, WorkedExamples) {
  const Sizes sizes{8, 8};
  const Window strided{.kernel = 3, .stride = 2, .pad_lo = 1, .pad_hi = 1};
  const auto pieces = plan_window_gradient(sizes, strided, 8);
  EXPECT_EQ(pieces[0].inputs, (Range{0, 5}));
  EXPECT_EQ(pieces[1].inputs, (Range{4, 8}));
  const Sizes halves{2, 2};
  const auto doubled = plan_transposed_window_gradient(halves, {.kernel = 2, .stride = 2}, 8);
  EXPECT_EQ(doubled[0], (WindowPiece{{0, 2}, {0, 4}, 0, 0}));
  EXPECT_EQ(doubled[1], (WindowPiece{{2, 4}, {4, 8}, 0, 0}));
}

TEST(PlanTransposedWindowGradient, EveryRankGetsTheOutputsOfItsRows) {
  Draws draws;
  for (int i = 0; i < 1000; ++i) {
    const Case c = draw_case(draws, 0, 8);
    const Range outputs{0, c.outputs()};
    for (const WindowPiece& piece :
         plan_transposed_window_gradient(c.sizes, c.window, c.outputs())) {
      for (int64_t row = piece.outputs.begin; row < piece.outputs.end; ++row) {
        const int64_t first = row * c.window.stride - c.window.pad_lo;
        for (int64_t tap = 0; tap < c.window.kernel; ++tap) {
          const int64_t output = first + tap * c.window.dilation;
          EXPECT_EQ(piece.inputs.contains(output), outputs.contains(output)) << c;
          // Place of the tap in the padded local rows.
          const int64_t local = (row - piece.outputs.begin) * c.window.stride +
                                tap * c.window.dilation - piece.pad_lo;
          if (piece.inputs.contains(output)) {
            EXPECT_EQ(piece.inputs.begin + local, output) << c;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace shardfield::spec
