#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shardfield/spec/integer.h"
#include "shardfield/spec/range.h"

namespace shardfield::spec {

/// Throws std::invalid_argument unless there is a piece and no size is negative.
inline void check_sizes(std::span<const int64_t> sizes, const std::string& who) {
  require(!sizes.empty(), who + ": expected one size per rank, got none; pass the piece sizes");
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    require(sizes[rank] >= 0, who + ": expected sizes >= 0, got " + std::to_string(sizes[rank]) +
                                  " on rank " + std::to_string(rank) +
                                  "; pass the number of rows of each piece");
  }
}

/// Output range per rank, from a rule that maps an inner input border to an output border. Ranks
/// with an empty piece get nothing, the ends go to the first and last rank that has rows; without
/// any rows rank 0 owns all outputs. The rule must not decrease.
template <typename Rule>
[[nodiscard]] std::vector<Range> place_outputs(std::span<const int64_t> sizes, int64_t num_outputs,
                                               Rule border_of) {
  const int64_t num_rows = total_of(sizes);
  std::vector<Range> outputs(sizes.size());
  int64_t row = 0;
  int64_t begin = 0;
  for (size_t rank = 0; rank < sizes.size(); ++rank) {
    row += sizes[rank];
    int64_t end = 0;
    if (row == num_rows) {
      end = num_outputs;
    } else if (row > 0) {
      end = std::clamp(border_of(row), begin, num_outputs);
    }
    outputs[rank] = {begin, end};
    begin = end;
  }
  return outputs;
}

}  // namespace shardfield::spec
