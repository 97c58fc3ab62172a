#pragma once

#include <cstdint>
#include <vector>

#include "shardfield/spec/layout.h"

namespace shardfield::spec {

/// Remembers that `coarse` came from `fine` by an op that shrinks (a strided convolution, pooling).
/// Networks that go down and up again meet the finer tensor once more (skip connections), and what
/// goes up should be cut as it is, else rows move a second time to join them.
///
/// Kept per thread, as every rank runs the same calls: all ranks remember the same. Local.
void remember_finer(const Layout* coarse, const Layout* fine);

/// Piece sizes that cut `c` of `coarse` had before it shrank, if that gave `num_rows` rows in all;
/// else none. Local.
[[nodiscard]] std::vector<int64_t> finer_sizes(const Layout& coarse, size_t c, int64_t num_rows);

}  // namespace shardfield::spec
