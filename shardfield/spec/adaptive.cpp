#include "shardfield/spec/adaptive.h"

#include <string>

#include "shardfield/spec/integer.h"
#include "shardfield/spec/output_borders.h"

namespace shardfield::spec {

Range adaptive_window(int64_t output, int64_t num_rows, int64_t num_outputs) {
  return {floor_div(output * num_rows, num_outputs),
          ceil_div((output + 1) * num_rows, num_outputs)};
}

std::vector<MappedPiece> plan_adaptive(std::span<const int64_t> sizes, int64_t num_outputs) {
  check_sizes(sizes, "plan_adaptive");
  const int64_t num_rows = total_of(sizes);
  require(num_outputs >= 0 && (num_outputs == 0 || num_rows > 0),
          "plan_adaptive: expected rows to pool, got " + std::to_string(num_rows) + " rows for " +
              std::to_string(num_outputs) + " outputs");
  // Both neighbours of b*m/n: the windows before one end above b, those behind the other start
  // below it.
  const auto border_of = [&](int64_t row) {
    const int64_t low = floor_div(row * num_outputs, num_rows);
    const int64_t high = ceil_div(row * num_outputs, num_rows);
    const int64_t rows_low = row - floor_div(low * num_rows, num_outputs);
    const int64_t rows_high = ceil_div(high * num_rows, num_outputs) - row;
    return rows_low < rows_high ? low : high;
  };
  std::vector<MappedPiece> pieces;
  pieces.reserve(sizes.size());
  for (const Range& outputs : place_outputs(sizes, num_outputs, border_of)) {
    MappedPiece piece{outputs, {}};
    if (!outputs.empty()) {
      piece.inputs = {adaptive_window(outputs.begin, num_rows, num_outputs).begin,
                      adaptive_window(outputs.end - 1, num_rows, num_outputs).end};
    }
    pieces.push_back(piece);
  }
  return pieces;
}

}  // namespace shardfield::spec
