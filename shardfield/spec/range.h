#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace shardfield::spec {

/// Half-open range [begin, end) of global rows of one tensor dim.
///
/// Example: Range{3, 7} holds rows 3, 4, 5, 6; its size is 4.
struct Range {
  int64_t begin = 0;
  int64_t end = 0;

  [[nodiscard]] constexpr int64_t size() const { return end > begin ? end - begin : 0; }
  [[nodiscard]] constexpr bool empty() const { return end <= begin; }
  [[nodiscard]] constexpr bool contains(int64_t row) const { return begin <= row && row < end; }

  /// The rows in both ranges. Example: {0, 5} with {3, 9} gives {3, 5}.
  [[nodiscard]] constexpr Range intersect(Range other) const {
    const int64_t low = std::max(begin, other.begin);
    return {low, std::max(low, std::min(end, other.end))};
  }

  /// The same rows counted from `origin`. Example: {5, 8} shifted by -5 is {0, 3}.
  [[nodiscard]] constexpr Range shifted(int64_t by) const { return {begin + by, end + by}; }

  friend constexpr bool operator==(const Range&, const Range&) = default;
};

/// Global rows of each piece, in rank order.
/// Example: sizes 3, 0, 2 give {0, 3}, {3, 3}, {3, 5}.
[[nodiscard]] std::vector<Range> ranges_of(std::span<const int64_t> sizes);

/// The sizes of `ranges`. Example: {0, 3}, {3, 3}, {3, 5} give 3, 0, 2.
[[nodiscard]] std::vector<int64_t> sizes_of(std::span<const Range> ranges);

/// Sum of `sizes`.
[[nodiscard]] int64_t total_of(std::span<const int64_t> sizes);

/// Rank whose piece holds global `row`; -1 when none does.
/// Example: sizes 3, 0, 2: row 3 belongs to rank 2.
[[nodiscard]] int owner_of(std::span<const int64_t> sizes, int64_t row);

/// Piece sizes as `torch.chunk` cuts them, padded with zeros to exactly `parts` entries.
/// Example: 5 rows in 4 parts give 2, 2, 1, 0.
[[nodiscard]] std::vector<int64_t> chunk_sizes(int64_t num_rows, int64_t parts);

/// Piece sizes of DTensor's `Shard`: ceil(num_rows / parts) rows each until none are left.
/// The same numbers as chunk_sizes; example: 9 rows in 4 parts give 3, 3, 3, 0.
[[nodiscard]] std::vector<int64_t> blockwise_sizes(int64_t num_rows, int64_t parts);

/// Piece sizes that differ by at most one row, the larger first.
/// Example: 9 rows in 4 parts give 3, 2, 2, 2.
[[nodiscard]] std::vector<int64_t> balanced_sizes(int64_t num_rows, int64_t parts);

}  // namespace shardfield::spec
