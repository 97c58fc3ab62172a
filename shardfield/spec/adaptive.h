#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/spec/range.h"

namespace shardfield::spec {

/// Rows that output `output` of an adaptive pooling from `num_rows` to `num_outputs` reads:
/// [floor(o*n/m), ceil((o+1)*n/m)).
/// Example: 5 rows to 3 outputs: {0, 2}, {1, 4}, {3, 5}.
[[nodiscard]] Range adaptive_window(int64_t output, int64_t num_rows, int64_t num_outputs);

/// Owned outputs and the global rows they need, of one rank.
struct MappedPiece {
  Range outputs;
  Range inputs;

  friend bool operator==(const MappedPiece&, const MappedPiece&) = default;
};

/// Places the outputs of an adaptive pooling on the ranks so that the fewest rows cross each
/// border (Local, pure). Outputs partition [0, num_outputs) in rank order.
///
/// @throws std::invalid_argument when there are outputs but no rows, or a size is negative.
///
/// Example: sizes 3, 2 to 3 outputs: rank 0 owns {0, 2} and needs {0, 4}; rank 1 owns {2, 3} and
/// needs {3, 5}: one row (3) moves.
[[nodiscard]] std::vector<MappedPiece> plan_adaptive(std::span<const int64_t> sizes,
                                                     int64_t num_outputs);

}  // namespace shardfield::spec
