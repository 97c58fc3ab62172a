#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/spec/range.h"
#include "shardfield/spec/rows.h"

namespace shardfield::spec {

/// Padding modes of PyTorch. Reflect does not repeat the edge row, circular wraps round.
enum class PadMode { kConstant, kReflect, kReplicate, kCircular };

/// Row that output `output` of a padded dim shows; -1 for a constant row. `pad_lo` may be
/// negative (crop). Wraps and reflects as often as needed.
///
/// Example: 4 rows, pad_lo 2: outputs 0, 1 show rows 2, 1 (reflect), 0, 0 (replicate), 2, 3
/// (circular), -1, -1 (constant).
[[nodiscard]] int64_t pad_source(int64_t output, int64_t num_rows, int64_t pad_lo, PadMode mode);

/// Sources of a range of outputs of the padded dim, in order (not for constant padding). Use it
/// with plan_window on an unpadded window to fetch a padded halo in one exchange.
///
/// Example: 4 rows, pad_lo 2, reflect, outputs {0, 4}: {2, 2, -1}, {0, 2, 1}.
[[nodiscard]] std::vector<Segment> pad_segments(Range outputs, int64_t num_rows, int64_t pad_lo,
                                                PadMode mode);

/// One rank's share of a padded dim: `zeros_lo` constant rows, the rows of its RowPlan entry,
/// then `zeros_hi` constant rows; together its `outputs`.
struct PadPiece {
  Range outputs;
  int64_t zeros_lo = 0;
  int64_t zeros_hi = 0;
};

/// A padded dim: who owns which outputs, and which rows everybody needs for them.
struct PadPlan {
  std::vector<PadPiece> pieces;
  RowPlan rows;
};

/// Pads a cut dim (Local, pure). Every rank keeps its rows; the first non-empty piece takes the
/// rows padded in front, the last one those behind. Negative padding crops.
///
/// @throws std::invalid_argument for reflect padding >= the rows, circular padding > the rows
/// (PyTorch's own limits), or cropping below zero.
///
/// Example: sizes 2, 2, pad 1 and 1, circular: rank 0 wants row 3, then rows 0, 1; rank 1 wants
/// rows 2, 3, then row 0: two rows move.
[[nodiscard]] PadPlan plan_pad(std::span<const int64_t> sizes, int64_t pad_lo, int64_t pad_hi,
                               PadMode mode);

}  // namespace shardfield::spec
