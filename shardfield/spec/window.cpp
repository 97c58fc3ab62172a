#include "shardfield/spec/window.h"

#include <cstdlib>
#include <string>

#include "shardfield/spec/integer.h"
#include "shardfield/spec/output_borders.h"

namespace shardfield::spec {

namespace {

void check_window(const Window& window, const std::string& who) {
  require(window.kernel >= 1 && window.stride >= 1 && window.dilation >= 1,
          who + ": expected kernel, stride and dilation >= 1, got kernel " +
              std::to_string(window.kernel) + ", stride " + std::to_string(window.stride) +
              ", dilation " + std::to_string(window.dilation));
}

/// Outputs and inputs run in step: output border b/stride belongs to input border b.
bool runs_in_step(int64_t coarse, int64_t fine, int64_t stride) {
  return std::abs(coarse * stride - fine) < stride;
}

/// Rows that cross a border when the first window behind it starts `offset` rows after it:
/// windows behind reach back over -offset rows, the last one before reaches over the border.
int64_t rows_crossing(const Window& window, int64_t offset) {
  return std::max<int64_t>(-offset, 0) +
         std::max<int64_t>(offset - window.stride + window.extent(), 0);
}

/// Whether placing by shift `pad_lo` moves as few rows as the centred shift, for every border.
/// Offsets from a shift are the `stride` numbers from -shift on, one per remainder.
bool pad_shift_is_free(const Window& window, int64_t centred) {
  for (int64_t i = 0; i < window.stride; ++i) {
    const int64_t offset = -window.pad_lo + i;
    const int64_t best = -centred + floor_mod(offset + centred, window.stride);
    if (rows_crossing(window, offset) > rows_crossing(window, best)) {
      return false;
    }
  }
  return true;
}

WindowPiece window_piece(Range outputs, int64_t num_rows, const Window& window) {
  WindowPiece piece;
  piece.outputs = outputs;
  if (outputs.empty()) {
    return piece;
  }
  const int64_t low = outputs.begin * window.stride - window.pad_lo;
  const int64_t high = (outputs.end - 1) * window.stride - window.pad_lo + window.extent();
  piece.inputs = Range{0, num_rows}.intersect({low, high});
  if (piece.inputs.empty()) {
    piece.inputs = {0, 0};
    piece.pad_lo = high - low;
    return piece;
  }
  piece.pad_lo = piece.inputs.begin - low;
  piece.pad_hi = high - piece.inputs.end;
  return piece;
}

/// Input rows that cross a border of a transposed window when the output border lies `offset`
/// rows after the first output that the first input behind the border reaches.
int64_t transposed_rows_crossing(const Window& window, int64_t offset) {
  return std::max<int64_t>(ceil_div(offset, window.stride), 0) +
         std::max<int64_t>(floor_div(window.extent() - 1 - offset, window.stride), 0);
}

/// The cheapest offset (as above), nearest to pad_lo when in step, else to the overlap's middle.
int64_t transposed_offset(const Window& window, bool in_step) {
  const int64_t twice_target = in_step ? 2 * window.pad_lo : window.extent() - window.stride;
  int64_t best = 0;
  for (int64_t offset = 1 - window.stride; offset < window.extent(); ++offset) {
    const int64_t rows = transposed_rows_crossing(window, offset);
    const int64_t best_rows = transposed_rows_crossing(window, best);
    const bool nearer = std::abs(2 * offset - twice_target) <= std::abs(2 * best - twice_target);
    if (rows < best_rows || (rows == best_rows && nearer)) {
      best = offset;
    }
  }
  return best;
}

TransposedPiece transposed_piece(Range outputs, int64_t num_rows, const Window& window) {
  TransposedPiece piece;
  piece.outputs = outputs;
  if (outputs.empty()) {
    return piece;
  }
  const int64_t first =
      ceil_div(outputs.begin + window.pad_lo - window.extent() + 1, window.stride);
  const int64_t last = floor_div(outputs.end - 1 + window.pad_lo, window.stride);
  piece.inputs = Range{0, num_rows}.intersect({first, last + 1});
  if (piece.inputs.empty()) {
    piece.inputs = {0, 0};
    piece.pad_hi = outputs.size();
    return piece;
  }
  const int64_t low = piece.inputs.begin * window.stride - window.pad_lo;
  const int64_t high = (piece.inputs.end - 1) * window.stride - window.pad_lo + window.extent();
  piece.crop_lo = std::max<int64_t>(outputs.begin - low, 0);
  piece.pad_lo = std::max<int64_t>(low - outputs.begin, 0);
  piece.crop_hi = std::max<int64_t>(high - outputs.end, 0);
  piece.pad_hi = std::max<int64_t>(outputs.end - high, 0);
  return piece;
}

}  // namespace

int64_t num_outputs(int64_t num_rows, const Window& window, bool ceil_mode) {
  check_window(window, "num_outputs");
  const int64_t free_rows = num_rows + window.pad_lo + window.pad_hi - window.extent();
  int64_t outputs = floor_div(free_rows + (ceil_mode ? window.stride - 1 : 0), window.stride) + 1;
  if (ceil_mode && (outputs - 1) * window.stride >= num_rows + window.pad_lo) {
    --outputs;  // The last window would start in the right padding.
  }
  return std::max<int64_t>(outputs, 0);
}

std::vector<WindowPiece> plan_window(std::span<const int64_t> sizes, const Window& window,
                                     int64_t num_outputs) {
  check_sizes(sizes, "plan_window");
  check_window(window, "plan_window");
  require(num_outputs >= 0,
          "plan_window: expected num_outputs >= 0, got " + std::to_string(num_outputs));
  const int64_t num_rows = total_of(sizes);
  int64_t shift = (window.extent() - 1) / 2;
  if (runs_in_step(num_outputs, num_rows, window.stride) && pad_shift_is_free(window, shift)) {
    shift = window.pad_lo;
  }
  const auto border_of = [&](int64_t row) {
    return ceil_div(row + window.pad_lo - shift, window.stride);
  };
  std::vector<WindowPiece> pieces;
  pieces.reserve(sizes.size());
  for (const Range& outputs : place_outputs(sizes, num_outputs, border_of)) {
    pieces.push_back(window_piece(outputs, num_rows, window));
  }
  return pieces;
}

int64_t num_transposed_outputs(int64_t num_rows, const Window& window, int64_t output_padding) {
  check_window(window, "num_transposed_outputs");
  const int64_t outputs = (num_rows - 1) * window.stride - window.pad_lo - window.pad_hi +
                          window.extent() + output_padding;
  return std::max<int64_t>(outputs, 0);
}

std::vector<TransposedPiece> plan_transposed_window(std::span<const int64_t> sizes,
                                                    const Window& window, int64_t output_padding) {
  check_sizes(sizes, "plan_transposed_window");
  check_window(window, "plan_transposed_window");
  const int64_t num_rows = total_of(sizes);
  const int64_t total = num_transposed_outputs(num_rows, window, output_padding);
  const int64_t offset = transposed_offset(window, runs_in_step(num_rows, total, window.stride));
  const auto border_of = [&](int64_t row) { return row * window.stride - window.pad_lo + offset; };
  std::vector<TransposedPiece> pieces;
  pieces.reserve(sizes.size());
  for (const Range& outputs : place_outputs(sizes, total, border_of)) {
    pieces.push_back(transposed_piece(outputs, num_rows, window));
  }
  return pieces;
}

std::vector<TransposedPiece> plan_window_gradient(std::span<const int64_t> sizes,
                                                  const Window& window, int64_t num_outputs) {
  check_sizes(sizes, "plan_window_gradient");
  check_window(window, "plan_window_gradient");
  std::vector<TransposedPiece> pieces;
  pieces.reserve(sizes.size());
  for (const Range& rows : ranges_of(sizes)) {
    pieces.push_back(transposed_piece(rows, num_outputs, window));
  }
  return pieces;
}

std::vector<WindowPiece> plan_transposed_window_gradient(std::span<const int64_t> sizes,
                                                         const Window& window,
                                                         int64_t num_outputs) {
  check_sizes(sizes, "plan_transposed_window_gradient");
  check_window(window, "plan_transposed_window_gradient");
  std::vector<WindowPiece> pieces;
  pieces.reserve(sizes.size());
  for (const Range& rows : ranges_of(sizes)) {
    pieces.push_back(window_piece(rows, num_outputs, window));
  }
  return pieces;
}

}  // namespace shardfield::spec
