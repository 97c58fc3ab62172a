#include "shardfield/spec/window.h"

#include <stdexcept>

#include <gtest/gtest.h>

#include "moved_rows.h"
#include "random_draws.h"

#include "shardfield/spec/integer.h"

namespace shardfield::spec {
namespace {

using Sizes = std::vector<int64_t>;

/// A random layer on random pieces.
struct Case {
  Sizes sizes;
  Window window;
  bool ceil_mode = false;

  [[nodiscard]] int64_t rows() const { return total_of(sizes); }
  [[nodiscard]] int64_t outputs() const { return num_outputs(rows(), window, ceil_mode); }
};

std::ostream& operator<<(std::ostream& out, const Case& c) {
  return out << "sizes " << join(c.sizes) << " kernel " << c.window.kernel << " stride "
             << c.window.stride << " dilation " << c.window.dilation << " pad " << c.window.pad_lo
             << "," << c.window.pad_hi << (c.ceil_mode ? " ceil" : "");
}

Case draw_case(Draws& draws, int64_t smallest, int64_t largest) {
  Case c;
  c.sizes = draws.sizes(draws.in(1, 6), smallest, largest);
  c.window.kernel = draws.in(1, 7);
  c.window.stride = draws.in(1, 5);
  c.window.dilation = draws.in(1, 3);
  c.window.pad_lo = draws.in(0, c.window.extent() / 2);
  c.window.pad_hi = draws.once_in(2) ? c.window.pad_lo : draws.in(0, c.window.extent());
  c.ceil_mode = draws.once_in(3);
  return c;
}

Sizes output_sizes(const std::vector<WindowPiece>& pieces) {
  Sizes sizes;
  sizes.reserve(pieces.size());
  for (const WindowPiece& piece : pieces) {
    sizes.push_back(piece.outputs.size());
  }
  return sizes;
}

TEST(Window, CountsOutputsAsPooling) {
  EXPECT_EQ(num_outputs(5, {.kernel = 2, .stride = 2}), 2);
  EXPECT_EQ(num_outputs(5, {.kernel = 2, .stride = 2}, true), 3);
  EXPECT_EQ(num_outputs(3, {.kernel = 3, .stride = 3, .pad_lo = 1, .pad_hi = 1}, true), 2);
  EXPECT_EQ(num_outputs(2, {.kernel = 2, .stride = 3, .pad_lo = 1, .pad_hi = 1}, true), 1);
  EXPECT_EQ(num_outputs(2, {.kernel = 5}), 0);
  EXPECT_THROW((void)num_outputs(5, {.kernel = 2, .stride = 0}), std::invalid_argument);
}

TEST(Window, CountsOutputsAsTheDefinitionDoes) {
  Draws draws;
  for (int i = 0; i < 3000; ++i) {
    Case c = draw_case(draws, 0, 9);
    c.window.pad_hi = c.window.pad_lo;  // As pooling has it.
    int64_t count = 0;
    for (int64_t o = 0; o <= c.rows() + 40; ++o) {
      const int64_t start = o * c.window.stride;  // Counted from the start of the padding.
      const int64_t end = c.rows() + 2 * c.window.pad_lo;
      const bool fits = start + c.window.extent() <= end;
      const bool overhangs = start + c.window.extent() <= end + c.window.stride - 1 &&
                             start < c.rows() + c.window.pad_lo;
      count += fits || (c.ceil_mode && overhangs) ? 1 : 0;
    }
    EXPECT_EQ(c.outputs(), count) << c;
  }
}

/// The local op without padding over the piece's rows reads what the global op reads.
void expect_piece_computes_its_outputs(const Case& c, const WindowPiece& piece) {
  const Window& w = c.window;
  const int64_t length = piece.pad_lo + piece.inputs.size() + piece.pad_hi;
  const Window bare{w.kernel, w.stride, w.dilation, 0, 0};
  EXPECT_EQ(length == 0 ? 0 : num_outputs(length, bare), piece.outputs.size()) << c;
  if (piece.outputs.empty()) {
    EXPECT_EQ(piece, (WindowPiece{piece.outputs, {}, 0, 0})) << c;
    return;
  }
  for (int64_t o = piece.outputs.begin; o < piece.outputs.end; ++o) {
    for (int64_t tap = 0; tap < w.kernel; ++tap) {
      const int64_t row = o * w.stride - w.pad_lo + tap * w.dilation;
      const int64_t local = (o - piece.outputs.begin) * w.stride + tap * w.dilation - piece.pad_lo;
      ASSERT_LT(local + piece.pad_lo, length) << c;
      const bool is_row = local >= 0 && local < piece.inputs.size();
      ASSERT_EQ(is_row, row >= 0 && row < c.rows()) << c << " output " << o << " tap " << tap;
      if (is_row) {
        ASSERT_EQ(piece.inputs.begin + local, row) << c;
      }
    }
  }
}

TEST(PlanWindow, PiecesComputeExactlyTheirOutputs) {
  Draws draws;
  for (int i = 0; i < 4000; ++i) {
    const Case c = draw_case(draws, 0, draws.once_in(2) ? 3 : 20);
    const auto pieces = plan_window(c.sizes, c.window, c.outputs());
    ASSERT_EQ(pieces.size(), c.sizes.size());
    int64_t next = 0;
    for (size_t rank = 0; rank < pieces.size(); ++rank) {
      EXPECT_EQ(pieces[rank].outputs.begin, next) << c;
      EXPECT_GE(pieces[rank].outputs.end, next) << c;
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
  int64_t fewest = c.rows();
  for (int64_t border = 0; border <= c.outputs(); ++border) {
    const int64_t reach =
        border == 0 ? 0 : (border - 1) * c.window.stride - c.window.pad_lo + c.window.extent();
    const int64_t start =
        border == c.outputs() ? c.rows() : border * c.window.stride - c.window.pad_lo;
    const int64_t right = std::max<int64_t>(std::min(reach, c.rows()) - row, 0);
    const int64_t left = std::max<int64_t>(row - std::max<int64_t>(start, 0), 0);
    fewest = std::min(fewest, left + right);
  }
  return fewest;
}

TEST(PlanWindow, MovesAsFewRowsAsAnyPlacement) {
  Draws draws;
  for (int i = 0; i < 3000; ++i) {
    Case c = draw_case(draws, 0, 0);
    const int64_t thick = 2 * c.window.extent() + c.window.stride;
    c.sizes = draws.sizes(draws.in(2, 5), thick, thick + 20);
    int64_t fewest = 0;
    for (size_t rank = 1; rank < c.sizes.size(); ++rank) {
      fewest += fewest_over_border(c, ranges_of(c.sizes)[rank].begin);
    }
    EXPECT_EQ(moved(c.sizes, plan_window(c.sizes, c.window, c.outputs())), fewest) << c;
  }
}

TEST(PlanWindow, MovesTheLimitForUsualLayers) {
  const Sizes even{32, 32, 32};
  for (const Window& w :
       std::vector<Window>{{.kernel = 3, .stride = 1, .pad_lo = 1, .pad_hi = 1},
                           {.kernel = 3, .stride = 2, .pad_lo = 1, .pad_hi = 1},
                           {.kernel = 4, .stride = 2, .pad_lo = 1, .pad_hi = 1},
                           {.kernel = 5, .stride = 2, .pad_lo = 2, .pad_hi = 2},
                           {.kernel = 7, .stride = 2, .pad_lo = 3, .pad_hi = 3},
                           {.kernel = 3, .stride = 1, .dilation = 2, .pad_lo = 2, .pad_hi = 2},
                           {.kernel = 3, .stride = 1, .pad_lo = 0, .pad_hi = 0},
                           {.kernel = 2, .stride = 2},
                           {.kernel = 4, .stride = 4},
                           {.kernel = 1, .stride = 2}}) {
    const Case c{even, w, false};
    EXPECT_EQ(moved(even, plan_window(even, w, c.outputs())), 2 * w.overlap()) << c;
  }
}

TEST(PlanWindow, KeepsPiecesInStepForSameLayers) {
  Draws draws;
  for (int i = 0; i < 1000; ++i) {
    Case c;
    c.sizes = draws.sizes(draws.in(1, 5), 0, 30);
    const int64_t stride = draws.in(1, 2);
    const int64_t kernel = 2 * draws.in(0, 3) + 1;
    c.window = {kernel, stride, draws.in(1, 2), 0, 0};
    c.window.pad_lo = c.window.pad_hi = c.window.extent() / 2;
    const auto pieces = plan_window(c.sizes, c.window, c.outputs());
    const auto owned = ranges_of(c.sizes);
    for (size_t rank = 0; rank < pieces.size(); ++rank) {
      EXPECT_EQ(pieces[rank].outputs.end, ceil_div(owned[rank].end, stride)) << c;
    }
  }
}

TEST(PlanWindow, KeepsPiecesOfCausalLayers) {
  const Sizes sizes{5, 6, 4};
  const Window causal{.kernel = 3, .pad_lo = 2, .pad_hi = 0};
  EXPECT_EQ(output_sizes(plan_window(sizes, causal, 15)), sizes);
}

TEST(PlanWindow, WorkedExamples) {
  const Sizes sizes{8, 8};
  const auto strided = plan_window(sizes, {.kernel = 3, .stride = 2, .pad_lo = 1, .pad_hi = 1}, 8);
  EXPECT_EQ(strided[0], (WindowPiece{{0, 4}, {0, 8}, 1, 0}));
  EXPECT_EQ(strided[1], (WindowPiece{{4, 8}, {7, 16}, 0, 0}));
  // Five and five rows, windows of two: the middle window needs a row of the other side.
  const Sizes odd{5, 5};
  const auto halved = plan_window(odd, {.kernel = 2, .stride = 2}, 5);
  EXPECT_EQ(halved[0], (WindowPiece{{0, 3}, {0, 6}, 0, 0}));
  EXPECT_EQ(halved[1], (WindowPiece{{3, 5}, {6, 10}, 0, 0}));
  // Three rows either side reach over two ranks of two rows.
  const Sizes thin{2, 2, 2, 2};
  const auto wide = plan_window(thin, {.kernel = 7, .pad_lo = 3, .pad_hi = 3}, 8);
  EXPECT_EQ(wide[0], (WindowPiece{{0, 2}, {0, 5}, 3, 0}));
  EXPECT_EQ(wide[1], (WindowPiece{{2, 4}, {0, 7}, 1, 0}));
  // Ceil mode: the last window hangs one row over the end.
  const Sizes uneven{3, 2};
  const auto ceiled = plan_window(uneven, {.kernel = 2, .stride = 2}, 3);
  EXPECT_EQ(ceiled[0], (WindowPiece{{0, 2}, {0, 4}, 0, 0}));
  EXPECT_EQ(ceiled[1], (WindowPiece{{2, 3}, {4, 5}, 0, 1}));
}

TEST(PlanWindow, WithoutRowsTheFirstRankOwnsWhatPaddingMakes) {
  const Sizes none{0, 0};
  const auto pieces = plan_window(none, {.kernel = 2, .pad_lo = 1, .pad_hi = 2}, 2);
  EXPECT_EQ(pieces[0], (WindowPiece{{0, 2}, {0, 0}, 3, 0}));
  EXPECT_TRUE(pieces[1].outputs.empty());
}

TEST(PlanWindow, RefusesNonsense) {
  const Sizes good{4, 4};
  const Sizes negative{4, -1};
  EXPECT_THROW((void)plan_window({}, {.kernel = 3}, 1), std::invalid_argument);
  EXPECT_THROW((void)plan_window(negative, {.kernel = 3}, 1), std::invalid_argument);
  EXPECT_THROW((void)plan_window(good, {.kernel = 0}, 1), std::invalid_argument);
  EXPECT_THROW((void)plan_window(good, {.kernel = 3}, -1), std::invalid_argument);
}

}  // namespace
}  // namespace shardfield::spec
