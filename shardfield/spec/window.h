#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/spec/range.h"

namespace shardfield::spec {

/// A sliding window along one dim: convolution, pooling, unfold, or, read backwards, transposed
/// convolution. Output o reads rows [o*stride - pad_lo, o*stride - pad_lo + extent()).
struct Window {
  int64_t kernel = 1;
  int64_t stride = 1;
  int64_t dilation = 1;
  int64_t pad_lo = 0;
  int64_t pad_hi = 0;

  /// Rows from the first to the last tap. Example: kernel 3, dilation 2 span 5 rows.
  [[nodiscard]] constexpr int64_t extent() const { return dilation * (kernel - 1) + 1; }

  /// Fewest rows that can cross an inner border: max(extent - stride, 0).
  [[nodiscard]] constexpr int64_t overlap() const {
    return extent() > stride ? extent() - stride : 0;
  }
};

/// Number of outputs of a window over `num_rows` rows, as PyTorch counts them; 0 when the window
/// does not fit. With `ceil_mode` the last window may overhang the right padding but must start
/// inside the input or the left padding.
///
/// Example: 5 rows, kernel 2, stride 2: floor gives 2, ceil gives 3.
[[nodiscard]] int64_t num_outputs(int64_t num_rows, const Window& window, bool ceil_mode = false);

/// What one rank computes and needs. The local op, without padding, over
/// [pad_lo virtual rows | rows `inputs` | pad_hi virtual rows] yields exactly `outputs`.
/// All fields are empty or zero when the rank owns no output.
struct WindowPiece {
  Range outputs;       ///< Owned outputs, global.
  Range inputs;        ///< Needed rows, global, inside [0, num_rows); may lie several ranks away.
  int64_t pad_lo = 0;  ///< Padding rows before `inputs`.
  int64_t pad_hi = 0;  ///< Padding rows after `inputs`, the overhang of ceil mode included.

  friend bool operator==(const WindowPiece&, const WindowPiece&) = default;
};

/// Places the outputs of a window on the ranks so that the fewest rows cross each border, and
/// says which rows every rank needs (Local, pure).
///
/// Output borders are o_r = ceil((b_r + pad_lo - shift) / stride), b_r being the input borders.
/// The shift is `pad_lo` when that costs no row more and outputs and inputs run in step (so
/// o_r = ceil(b_r / stride) for every 'same' layer, whatever its kernel), else the one that
/// centres the window, (extent - 1) / 2. Ranks with an empty piece own no output, unless there
/// are outputs but no rows at all; then rank 0 owns them.
///
/// @param sizes        rows per rank, non-negative, empty pieces allowed.
/// @param window       kernel, stride, dilation >= 1; paddings of either sign.
/// @param num_outputs  global outputs, from num_outputs() or the op's own rule.
/// @return one piece per rank; outputs partition [0, num_outputs) in rank order.
/// @throws std::invalid_argument for a window or sizes that make no sense.
///
/// Example: sizes 8, 8, kernel 3, stride 2, pad 1, 8 outputs:
///   rank 0: outputs {0, 4}, inputs {0, 8}, pad_lo 1;  rank 1: outputs {4, 8}, inputs {7, 16}.
/// One row (7) moves.
[[nodiscard]] std::vector<WindowPiece> plan_window(std::span<const int64_t> sizes,
                                                   const Window& window, int64_t num_outputs);

/// Number of outputs of a transposed convolution:
/// (num_rows - 1)*stride - pad_lo - pad_hi + extent + output_padding.
/// Example: 4 rows, kernel 3, stride 2, pad 1, output_padding 1 give 8.
[[nodiscard]] int64_t num_transposed_outputs(int64_t num_rows, const Window& window,
                                             int64_t output_padding = 0);

/// What one rank computes and needs in a transposed convolution. The local op without padding
/// over `inputs` yields rows from inputs.begin*stride - pad_lo(window) on; drop `crop_lo` rows in
/// front and `crop_hi` behind, then put `pad_lo` and `pad_hi` rows that no input reaches (zero
/// plus bias) round the rest: that is exactly `outputs`. With `inputs` empty all owned outputs
/// are such rows, counted in pad_hi.
struct TransposedPiece {
  Range outputs;
  Range inputs;
  int64_t crop_lo = 0;
  int64_t crop_hi = 0;
  int64_t pad_lo = 0;
  int64_t pad_hi = 0;

  friend bool operator==(const TransposedPiece&, const TransposedPiece&) = default;
};

/// Places the outputs of a transposed convolution (Local, pure). Input i reaches outputs
/// [i*stride - pad_lo, i*stride - pad_lo + extent). floor((extent - 1) / stride) input rows cross
/// each border of pieces at least that thick; among the borders that reach this the one nearest
/// to b_r*stride is taken (an upsampling by `stride` keeps its pieces in step, except where that
/// costs a row, as in kernel 4, stride 2, pad 1: border 2*b_r + 1), or, if outputs and inputs do
/// not run in step, the middle of the overlap.
///
/// @param sizes           rows per rank of the input.
/// @param window          kernel, stride, dilation, padding of the transposed convolution.
/// @param output_padding  extra rows at the end, as in PyTorch.
/// @return one piece per rank; outputs partition [0, num_transposed_outputs) in rank order.
/// @throws std::invalid_argument for a window or sizes that make no sense.
///
/// Example: sizes 2, 2, kernel 2, stride 2: outputs {0, 4}, {4, 8}, inputs {0, 2}, {2, 4}: no row
/// moves. Kernel 3, stride 2, pad 1, output_padding 1: outputs {0, 4}, {4, 8}; rank 0 needs
/// {0, 3}, crops 1 row in front and 2 behind; one row (2) moves.
[[nodiscard]] std::vector<TransposedPiece> plan_transposed_window(std::span<const int64_t> sizes,
                                                                  const Window& window,
                                                                  int64_t output_padding = 0);

/// Backward of a window by output gradients: every rank computes the gradient of the rows it owns,
/// as a transposed window over the output gradients `inputs` that reach them; nothing is added
/// across ranks (Local, pure). In the pieces, `outputs` are rows and `inputs` are outputs of the
/// forward window.
///
/// Example: sizes 8, 8, kernel 3, stride 2, pad 1, 8 outputs: rank 0 needs output gradients
/// {0, 5}, rank 1 {4, 8}: one moves.
[[nodiscard]] std::vector<TransposedPiece> plan_window_gradient(std::span<const int64_t> sizes,
                                                                const Window& window,
                                                                int64_t num_outputs);

/// The same for a transposed window: the gradient of the owned rows is a window over the output
/// gradients `inputs` (Local, pure). `num_outputs` is num_transposed_outputs().
///
/// Example: sizes 2, 2, kernel 2, stride 2, 8 outputs: rank 0 needs {0, 4}, rank 1 {4, 8}.
[[nodiscard]] std::vector<WindowPiece> plan_transposed_window_gradient(
    std::span<const int64_t> sizes, const Window& window, int64_t num_outputs);

}  // namespace shardfield::spec
