#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/spec/range.h"

namespace shardfield::spec {

/// `count` rows start, start + step, start + 2*step, ... Any step: -1 runs backwards, 0 repeats.
/// Example: {5, 3, -1} is rows 5, 4, 3.
struct Segment {
  int64_t start = 0;
  int64_t count = 0;
  int64_t step = 1;

  [[nodiscard]] constexpr int64_t at(int64_t i) const { return start + i * step; }
  friend bool operator==(const Segment&, const Segment&) = default;
};

/// The segment of a range; its step is 1.
[[nodiscard]] constexpr Segment segment_of(Range range) {
  return {range.begin, range.size(), 1};
}

/// Which global rows of a cut dim every rank wants, in order. Known alike on all ranks.
struct RowPlan {
  std::vector<int64_t> sizes;                ///< Rows that each rank owns now.
  std::vector<std::vector<Segment>> wanted;  ///< Global rows each rank is to hold afterwards.

  /// Rows per rank afterwards.
  [[nodiscard]] std::vector<int64_t> wanted_sizes() const;

  friend bool operator==(const RowPlan&, const RowPlan&) = default;
};

/// Element i of `source` goes to position target.at(i) of the result. Target steps are +1.
struct RowCopy {
  Segment source;
  Segment target;
  friend bool operator==(const RowCopy&, const RowCopy&) = default;
};

/// Rows of the own piece that go to `peer`, packed in the order of `rows` (local row numbers,
/// ascending, each row once even if the peer wants it twice).
struct RowSend {
  int peer = 0;
  int64_t num_rows = 0;
  std::vector<Segment> rows;
};

/// `num_rows` rows arrive from `peer`; `places` says where each row of that buffer goes in the
/// wanted list. A buffer row may go to several places.
struct RowReceive {
  int peer = 0;
  int64_t num_rows = 0;
  std::vector<RowCopy> places;
};

/// One rank's part of a RowPlan. The adjoint runs it backwards: add the gradient rows at
/// `places` into the buffer, send it to `peer`, and there add it to `rows`; copies likewise.
/// Every wanted position is the target of exactly one copy or place.
struct RowMessages {
  std::vector<RowSend> sends;        ///< By ascending peer; only peers that get something.
  std::vector<RowReceive> receives;  ///< By ascending peer.
  std::vector<RowCopy> copies;       ///< Own rows (local numbers) to positions in the result.
  int64_t num_wanted = 0;            ///< Rows of the result.

  [[nodiscard]] int64_t rows_sent() const;
  [[nodiscard]] int64_t rows_received() const;
};

/// What `rank` sends, receives and copies (Local, pure). Every row travels at most once between
/// two ranks. Sends and receives of all ranks match pairwise.
///
/// @throws std::invalid_argument when a wanted row does not exist or rank is out of range.
///
/// Example: sizes 4, 4; rank 1 wants {3, 5, 1}. On rank 0: sends to 1 local row 3. On rank 1:
/// receives 1 row from 0 into position 0, copies local rows 0..3 to positions 1..4.
[[nodiscard]] RowMessages plan_messages(const RowPlan& plan, int rank);

/// Rows that leave their owner, over all ranks (each at most once per pair of ranks).
[[nodiscard]] int64_t rows_moved(const RowPlan& plan);

/// Every rank holds its needed range: halos, or anything a planner asked for.
/// Example: sizes 4, 4, needed {0, 5}, {3, 8}: rank 0 wants {0, 5, 1}, rank 1 {3, 5, 1}.
[[nodiscard]] RowPlan halo_plan(std::span<const int64_t> sizes, std::span<const Range> needed);

/// Rows in reverse order, piece sizes kept. Example: sizes 3, 2: rank 0 wants {4, 3, -1}.
[[nodiscard]] RowPlan flip_plan(std::span<const int64_t> sizes);

/// Result row i is row (i - shift) mod n, piece sizes kept. Example: sizes 3, 2, shift 1: rank 0
/// wants row 4, then {0, 2, 1}.
[[nodiscard]] RowPlan roll_plan(std::span<const int64_t> sizes, int64_t shift);

/// Same rows, other borders. Example: 3, 2 re-cut to 1, 4: rank 1 wants {1, 4, 1}.
/// @throws std::invalid_argument when the sums differ.
[[nodiscard]] RowPlan recut_plan(std::span<const int64_t> sizes,
                                 std::span<const int64_t> new_sizes);

/// Rows start, start + step, ... below stop, each kept by its owner: nothing moves.
/// Bounds are clamped to [0, n] as slicing does, negative ones count from the end; step >= 1.
/// Example: sizes 3, 3, slice(1, 6, 2): rank 0 wants {1, 1, 2}, rank 1 {3, 2, 2}.
[[nodiscard]] RowPlan slice_plan(std::span<const int64_t> sizes, int64_t start, int64_t stop,
                                 int64_t step);

}  // namespace shardfield::spec
