#include "shardfield/spec/pad.h"

#include <string>

#include "shardfield/spec/integer.h"
#include "shardfield/spec/output_borders.h"

namespace shardfield::spec {

namespace {

/// Appends one row, growing the last segment where the row continues it.
void append_row(std::vector<Segment>& segments, int64_t row) {
  if (!segments.empty()) {
    Segment& last = segments.back();
    if (last.count == 1) {
      const int64_t step = row - last.start;
      if (step >= -1 && step <= 1) {
        last = {last.start, 2, step};
        return;
      }
    } else if (row == last.at(last.count)) {
      ++last.count;
      return;
    }
  }
  segments.push_back({row, 1, 1});
}

void append_padding(std::vector<Segment>& segments, Range outputs, int64_t num_rows, int64_t pad_lo,
                    PadMode mode) {
  std::vector<Segment> run;
  for (int64_t output = outputs.begin; output < outputs.end; ++output) {
    append_row(run, pad_source(output, num_rows, pad_lo, mode));
  }
  segments.insert(segments.end(), run.begin(), run.end());
}

void check_pad(int64_t num_rows, int64_t pad_lo, int64_t pad_hi, PadMode mode) {
  const std::string got = ", got " + std::to_string(pad_lo) + " and " + std::to_string(pad_hi) +
                          " on " + std::to_string(num_rows) + " rows";
  require(num_rows + pad_lo + pad_hi >= 0, "plan_pad: expected to crop at most all rows" + got);
  const int64_t most = std::max(pad_lo, pad_hi);
  require(mode != PadMode::kReflect || most < std::max<int64_t>(num_rows, 1),
          "plan_pad: expected reflect padding below the number of rows" + got);
  require(mode != PadMode::kCircular || most <= num_rows,
          "plan_pad: expected circular padding of at most the number of rows" + got);
  require(mode != PadMode::kReplicate || num_rows > 0 || most <= 0,
          "plan_pad: expected rows to replicate" + got);
}

}  // namespace

int64_t pad_source(int64_t output, int64_t num_rows, int64_t pad_lo, PadMode mode) {
  const int64_t row = output - pad_lo;
  if (row >= 0 && row < num_rows) {
    return row;
  }
  switch (mode) {
    case PadMode::kConstant:
      return -1;
    case PadMode::kReplicate:
      return row < 0 ? 0 : num_rows - 1;
    case PadMode::kCircular:
      return floor_mod(row, num_rows);
    case PadMode::kReflect:
      break;
  }
  if (num_rows == 1) {
    return 0;
  }
  const int64_t folded = floor_mod(row, 2 * (num_rows - 1));
  return folded < num_rows ? folded : 2 * (num_rows - 1) - folded;
}

std::vector<Segment> pad_segments(Range outputs, int64_t num_rows, int64_t pad_lo, PadMode mode) {
  const Range inside = outputs.intersect({pad_lo, pad_lo + num_rows});
  std::vector<Segment> segments;
  if (inside.empty()) {
    append_padding(segments, outputs, num_rows, pad_lo, mode);
    return segments;
  }
  append_padding(segments, {outputs.begin, inside.begin}, num_rows, pad_lo, mode);
  segments.push_back(segment_of(inside.shifted(-pad_lo)));
  append_padding(segments, {inside.end, outputs.end}, num_rows, pad_lo, mode);
  return segments;
}

PadPlan plan_pad(std::span<const int64_t> sizes, int64_t pad_lo, int64_t pad_hi, PadMode mode) {
  check_sizes(sizes, "plan_pad");
  const int64_t num_rows = total_of(sizes);
  check_pad(num_rows, pad_lo, pad_hi, mode);
  const int64_t total = num_rows + pad_lo + pad_hi;
  const auto border_of = [&](int64_t row) { return std::clamp<int64_t>(row + pad_lo, 0, total); };
  PadPlan plan;
  plan.rows.sizes.assign(sizes.begin(), sizes.end());
  for (const Range& outputs : place_outputs(sizes, total, border_of)) {
    PadPiece piece{outputs, 0, 0};
    Range shown = outputs;
    if (mode == PadMode::kConstant) {
      shown = outputs.intersect({pad_lo, pad_lo + num_rows});
      piece.zeros_lo = shown.empty() ? outputs.size() : shown.begin - outputs.begin;
      piece.zeros_hi = shown.empty() ? 0 : outputs.end - shown.end;
    }
    plan.pieces.push_back(piece);
    plan.rows.wanted.push_back(shown.empty() ? std::vector<Segment>{}
                                             : pad_segments(shown, num_rows, pad_lo, mode));
  }
  return plan;
}

}  // namespace shardfield::spec
