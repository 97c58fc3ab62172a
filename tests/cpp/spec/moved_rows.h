#pragma once

#include <cstdint>
#include <vector>

#include "shardfield/spec/rows.h"

namespace shardfield::spec {

/// Rows that change ranks when every rank fetches the `inputs` of its piece.
template <typename Piece>
int64_t moved(const std::vector<int64_t>& sizes, const std::vector<Piece>& pieces) {
  std::vector<Range> needed;
  needed.reserve(pieces.size());
  for (const Piece& piece : pieces) {
    needed.push_back(piece.inputs);
  }
  return rows_moved(halo_plan(sizes, needed));
}

}  // namespace shardfield::spec
