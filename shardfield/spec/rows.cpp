#include "shardfield/spec/rows.h"

#include <string>

#include "shardfield/spec/integer.h"
#include "shardfield/spec/output_borders.h"

namespace shardfield::spec {

namespace {

/// Which elements of `segment` lie in `rows`, as a range of element numbers.
Range elements_in(const Segment& segment, Range rows) {
  Range elements;
  if (segment.step > 0) {
    elements = {ceil_div(rows.begin - segment.start, segment.step),
                ceil_div(rows.end - segment.start, segment.step)};
  } else if (segment.step < 0) {
    elements = {ceil_div(segment.start - rows.end + 1, -segment.step),
                ceil_div(segment.start - rows.begin + 1, -segment.step)};
  } else if (rows.contains(segment.start)) {
    return {0, segment.count};
  }
  return Range{0, segment.count}.intersect(elements);
}

/// Rows of `owned` in a wanted list: local row numbers and positions in the list.
std::vector<RowCopy> copies_from(Range owned, const std::vector<Segment>& wanted) {
  std::vector<RowCopy> copies;
  int64_t position = 0;
  for (const Segment& segment : wanted) {
    const Range elements = elements_in(segment, owned);
    if (!elements.empty()) {
      const int64_t start = segment.at(elements.begin) - owned.begin;
      copies.push_back({{start, elements.size(), elements.size() == 1 ? 1 : segment.step},
                        {position + elements.begin, elements.size(), 1}});
    }
    position += segment.count;
  }
  return copies;
}

/// Lowest and one past the highest row of a segment.
Range span_of(const Segment& segment) {
  const int64_t last = segment.at(segment.count - 1);
  return {std::min(segment.start, last), std::max(segment.start, last) + 1};
}

/// Copies whose sources leave rows out, row by row; the others as they are.
std::vector<RowCopy> without_gaps(const std::vector<RowCopy>& copies) {
  std::vector<RowCopy> dense;
  for (const RowCopy& copy : copies) {
    if (copy.source.step >= -1 && copy.source.step <= 1) {
      dense.push_back(copy);
      continue;
    }
    for (int64_t i = 0; i < copy.source.count; ++i) {
      dense.push_back({{copy.source.at(i), 1, 1}, {copy.target.at(i), 1, 1}});
    }
  }
  return dense;
}

/// Each row once, ascending, as the fewest ranges.
std::vector<Range> merged_ranges(const std::vector<RowCopy>& copies) {
  std::vector<Range> spans;
  spans.reserve(copies.size());
  for (const RowCopy& copy : copies) {
    spans.push_back(span_of(copy.source));
  }
  std::sort(spans.begin(), spans.end(), [](Range a, Range b) { return a.begin < b.begin; });
  std::vector<Range> merged;
  for (const Range& span : spans) {
    if (!merged.empty() && span.begin <= merged.back().end) {
      merged.back().end = std::max(merged.back().end, span.end);
    } else {
      merged.push_back(span);
    }
  }
  return merged;
}

/// Rows that travel between two ranks, packed, and where they go.
struct Packed {
  std::vector<Range> rows;      ///< Local rows of the sender.
  std::vector<RowCopy> places;  ///< From the packed buffer to the wanted list.
  int64_t num_rows = 0;
};

Packed pack(const std::vector<RowCopy>& copies) {
  const std::vector<RowCopy> dense = without_gaps(copies);
  Packed packed;
  packed.rows = merged_ranges(dense);
  std::vector<int64_t> offsets;
  for (const Range& range : packed.rows) {
    offsets.push_back(packed.num_rows);
    packed.num_rows += range.size();
  }
  for (const RowCopy& copy : dense) {
    const auto behind =
        std::upper_bound(packed.rows.begin(), packed.rows.end(), copy.source.start,
                         [](int64_t row, const Range& range) { return row < range.begin; });
    const auto at = static_cast<size_t>(behind - packed.rows.begin()) - 1;
    const int64_t start = offsets[at] + copy.source.start - packed.rows[at].begin;
    packed.places.push_back({{start, copy.source.count, copy.source.step}, copy.target});
  }
  return packed;
}

void check_plan(const RowPlan& plan) {
  check_sizes(plan.sizes, "plan_messages");
  require(plan.sizes.size() == plan.wanted.size(),
          "plan_messages: expected one wanted list per rank, got " +
              std::to_string(plan.wanted.size()) + " for " + std::to_string(plan.sizes.size()) +
              " ranks");
  const Range all{0, total_of(plan.sizes)};
  for (const std::vector<Segment>& wanted : plan.wanted) {
    for (const Segment& segment : wanted) {
      require(segment.count >= 0 &&
                  (segment.count == 0 ||
                   (all.contains(segment.start) && all.contains(segment.at(segment.count - 1)))),
              "plan_messages: expected rows in [0, " + std::to_string(all.end) + "), got " +
                  std::to_string(segment.count) + " rows from " + std::to_string(segment.start) +
                  " by " + std::to_string(segment.step));
    }
  }
}

}  // namespace

std::vector<int64_t> RowPlan::wanted_sizes() const {
  std::vector<int64_t> counts;
  counts.reserve(wanted.size());
  for (const std::vector<Segment>& segments : wanted) {
    int64_t count = 0;
    for (const Segment& segment : segments) {
      count += segment.count;
    }
    counts.push_back(count);
  }
  return counts;
}

int64_t RowMessages::rows_sent() const {
  int64_t rows = 0;
  for (const RowSend& send : sends) {
    rows += send.num_rows;
  }
  return rows;
}

int64_t RowMessages::rows_received() const {
  int64_t rows = 0;
  for (const RowReceive& receive : receives) {
    rows += receive.num_rows;
  }
  return rows;
}

RowMessages plan_messages(const RowPlan& plan, int rank) {
  check_plan(plan);
  const auto ranks = static_cast<int>(plan.sizes.size());
  require(rank >= 0 && rank < ranks, "plan_messages: expected a rank below " +
                                         std::to_string(ranks) + ", got " + std::to_string(rank));
  const std::vector<Range> owned = ranges_of(plan.sizes);
  const auto me = static_cast<size_t>(rank);
  RowMessages messages;
  messages.num_wanted = plan.wanted_sizes()[me];
  messages.copies = copies_from(owned[me], plan.wanted[me]);
  for (int peer = 0; peer < ranks; ++peer) {
    const auto other = static_cast<size_t>(peer);
    if (peer == rank) {
      continue;
    }
    const Packed sent = pack(copies_from(owned[me], plan.wanted[other]));
    if (sent.num_rows > 0) {
      RowSend send{peer, sent.num_rows, {}};
      for (const Range& range : sent.rows) {
        send.rows.push_back(segment_of(range));
      }
      messages.sends.push_back(std::move(send));
    }
    Packed received = pack(copies_from(owned[other], plan.wanted[me]));
    if (received.num_rows > 0) {
      messages.receives.push_back({peer, received.num_rows, std::move(received.places)});
    }
  }
  return messages;
}

int64_t rows_moved(const RowPlan& plan) {
  check_plan(plan);
  const std::vector<Range> owned = ranges_of(plan.sizes);
  int64_t rows = 0;
  for (size_t from = 0; from < owned.size(); ++from) {
    for (size_t to = 0; to < owned.size(); ++to) {
      if (from != to) {
        rows += pack(copies_from(owned[from], plan.wanted[to])).num_rows;
      }
    }
  }
  return rows;
}

RowPlan halo_plan(std::span<const int64_t> sizes, std::span<const Range> needed) {
  RowPlan plan;
  plan.sizes.assign(sizes.begin(), sizes.end());
  for (const Range& range : needed) {
    plan.wanted.emplace_back();
    if (!range.empty()) {
      plan.wanted.back().push_back(segment_of(range));
    }
  }
  return plan;
}

RowPlan flip_plan(std::span<const int64_t> sizes) {
  RowPlan plan;
  plan.sizes.assign(sizes.begin(), sizes.end());
  const int64_t num_rows = total_of(sizes);
  for (const Range& range : ranges_of(sizes)) {
    plan.wanted.emplace_back();
    if (!range.empty()) {
      plan.wanted.back().push_back({num_rows - 1 - range.begin, range.size(), -1});
    }
  }
  return plan;
}

RowPlan roll_plan(std::span<const int64_t> sizes, int64_t shift) {
  RowPlan plan;
  plan.sizes.assign(sizes.begin(), sizes.end());
  const int64_t num_rows = total_of(sizes);
  for (const Range& range : ranges_of(sizes)) {
    plan.wanted.emplace_back();
    if (range.empty()) {
      continue;
    }
    const int64_t start = floor_mod(range.begin - shift, num_rows);
    const int64_t before_wrap = std::min(range.size(), num_rows - start);
    plan.wanted.back().push_back({start, before_wrap, 1});
    if (before_wrap < range.size()) {
      plan.wanted.back().push_back({0, range.size() - before_wrap, 1});
    }
  }
  return plan;
}

RowPlan recut_plan(std::span<const int64_t> sizes, std::span<const int64_t> new_sizes) {
  require(sizes.size() == new_sizes.size() && total_of(sizes) == total_of(new_sizes),
          "recut_plan: expected as many ranks and rows as before, got " +
              std::to_string(new_sizes.size()) + " ranks and " +
              std::to_string(total_of(new_sizes)) + " rows for " + std::to_string(sizes.size()) +
              " ranks and " + std::to_string(total_of(sizes)) + " rows");
  return halo_plan(sizes, ranges_of(new_sizes));
}

RowPlan slice_plan(std::span<const int64_t> sizes, int64_t start, int64_t stop, int64_t step) {
  require(step >= 1, "slice_plan: expected step >= 1, got " + std::to_string(step));
  const int64_t num_rows = total_of(sizes);
  start = std::clamp<int64_t>(start < 0 ? start + num_rows : start, 0, num_rows);
  stop = std::clamp<int64_t>(stop < 0 ? stop + num_rows : stop, start, num_rows);
  const Segment kept{start, ceil_div(stop - start, step), step};
  RowPlan plan;
  plan.sizes.assign(sizes.begin(), sizes.end());
  for (const Range& range : ranges_of(sizes)) {
    plan.wanted.emplace_back();
    const Range elements = elements_in(kept, range);
    if (!elements.empty()) {
      plan.wanted.back().push_back({kept.at(elements.begin), elements.size(), step});
    }
  }
  return plan;
}

}  // namespace shardfield::spec
