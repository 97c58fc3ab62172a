#include "shardfield/spec/resample.h"

#include <cmath>
#include <limits>
#include <string>

#include "shardfield/spec/integer.h"
#include "shardfield/spec/output_borders.h"

namespace shardfield::spec {

namespace {

// T is float or double: the type ATen computes coordinates in. Constants stay double on purpose
// where ATen's are, so that float results round at the same places.

/// Rows per output.
template <typename T>
T row_scale(int64_t num_rows, int64_t num_outputs, const ResampleOptions& options) {
  const bool nearest =
      options.mode == ResampleMode::kNearest || options.mode == ResampleMode::kNearestExact;
  if (options.align_corners && !nearest) {
    return num_outputs > 1 ? static_cast<T>(num_rows - 1) / static_cast<T>(num_outputs - 1) : T(0);
  }
  if (options.scale_factor.has_value() && *options.scale_factor > 0) {
    return static_cast<T>(1.0 / *options.scale_factor);
  }
  return static_cast<T>(num_rows) / static_cast<T>(num_outputs);
}

/// Coordinate of an output among the rows, before clamping. One rounding at the end, as in ATen's
/// kernels, which are compiled for processors that multiply and add in one instruction.
template <typename T>
T source_coordinate(T scale, int64_t output, bool align_corners) {
  if (align_corners) {
    return scale * static_cast<T>(output);
  }
  return std::fma(scale, static_cast<T>(output) + T(0.5), T(-0.5));
}

/// ATen takes the floor in float even of a double coordinate.
int64_t float_floor(double coordinate) {
  return static_cast<int64_t>(std::floor(static_cast<float>(coordinate)));
}

/// Towards zero, as ATen rounds the ends of antialiased supports.
int64_t truncate(double coordinate) {
  return static_cast<int64_t>(coordinate);
}

template <typename T>
T cubic_near(T x, T a) {
  return ((a + 2) * x - (a + 3)) * x * x + 1;
}

template <typename T>
T cubic_far(T x, T a) {
  return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a;
}

Taps empty_taps(int64_t num_rows, int64_t num_outputs, int64_t width) {
  Taps taps;
  taps.num_rows = num_rows;
  taps.num_outputs = num_outputs;
  taps.width = width;
  taps.index.assign(static_cast<size_t>(num_outputs * width), 0);
  taps.weights.assign(static_cast<size_t>(num_outputs * width), 0.0);
  return taps;
}

void set_tap(Taps& taps, int64_t output, int64_t tap, int64_t row, double weight) {
  const auto at = static_cast<size_t>(output * taps.width + tap);
  taps.index[at] = std::clamp<int64_t>(row, 0, taps.num_rows - 1);
  taps.weights[at] = weight;
}

/// Source row by the rule that computes in T throughout.
template <typename T>
int64_t nearest_row(T scale, int64_t output, bool exact) {
  if (!exact) {
    return float_floor(source_coordinate<T>(scale, output, true));
  }
  return float_floor(std::max<T>(source_coordinate<T>(scale, output, false), 0) + 0.5);
}

/// Source row by the rule in float, which treats factors 1 and 2 apart unless exact.
int64_t float_nearest_row(float scale, int64_t output, int64_t num_rows, int64_t num_outputs,
                          bool exact) {
  if (exact) {
    return float_floor((static_cast<double>(output) + 0.5) * scale);
  }
  if (num_outputs == num_rows) {
    return output;
  }
  if (num_outputs == 2 * num_rows) {
    return output / 2;
  }
  return float_floor(static_cast<float>(output) * scale);
}

template <typename T>
Taps nearest_taps(int64_t num_rows, int64_t num_outputs, const ResampleOptions& options) {
  Taps taps = empty_taps(num_rows, num_outputs, 1);
  const T scale = row_scale<T>(num_rows, num_outputs, options);
  const auto float_scale = row_scale<float>(num_rows, num_outputs, options);
  const bool exact = options.mode == ResampleMode::kNearestExact;
  for (int64_t output = 0; output < num_outputs; ++output) {
    const int64_t row = options.float_nearest
                            ? float_nearest_row(float_scale, output, num_rows, num_outputs, exact)
                            : nearest_row<T>(scale, output, exact);
    set_tap(taps, output, 0, row, 1.0);
  }
  return taps;
}

/// Row below the coordinate and the distance from it, both kept in range.
template <typename T>
struct RowAndDistance {
  int64_t row = 0;
  T distance = 0;
};

template <typename T>
RowAndDistance<T> split_coordinate(T coordinate, int64_t num_rows) {
  RowAndDistance<T> split;
  split.row = std::min(float_floor(coordinate), num_rows - 1);
  split.distance = std::clamp<T>(coordinate - static_cast<T>(split.row), 0, 1);
  return split;
}

template <typename T>
Taps linear_taps(int64_t num_rows, int64_t num_outputs, const ResampleOptions& options) {
  Taps taps = empty_taps(num_rows, num_outputs, 2);
  const T scale = row_scale<T>(num_rows, num_outputs, options);
  for (int64_t output = 0; output < num_outputs; ++output) {
    if (num_rows == num_outputs) {  // ATen copies, whatever the scale factor says.
      set_tap(taps, output, 0, output, 1.0);
      set_tap(taps, output, 1, output, 0.0);
      continue;
    }
    const T coordinate = std::max<T>(source_coordinate<T>(scale, output, options.align_corners), 0);
    const auto [row, distance] = split_coordinate<T>(coordinate, num_rows);
    set_tap(taps, output, 0, row, T(1) - distance);
    set_tap(taps, output, 1, row + 1, distance);
  }
  return taps;
}

template <typename T>
Taps cubic_taps(int64_t num_rows, int64_t num_outputs, const ResampleOptions& options) {
  Taps taps = empty_taps(num_rows, num_outputs, 4);
  const T scale = row_scale<T>(num_rows, num_outputs, options);
  const T a = T(-0.75);
  for (int64_t output = 0; output < num_outputs; ++output) {
    const T coordinate = source_coordinate<T>(scale, output, options.align_corners);
    const auto [row, t] = split_coordinate<T>(coordinate, num_rows);
    const T rest = T(1) - t;
    set_tap(taps, output, 0, row - 1, cubic_far<T>(t + T(1), a));
    set_tap(taps, output, 1, row, cubic_near<T>(t, a));
    set_tap(taps, output, 2, row + 1, cubic_near<T>(rest, a));
    set_tap(taps, output, 3, row + 2, cubic_far<T>(rest + T(1), a));
  }
  return taps;
}

template <typename T>
T antialias_filter(T x, bool cubic) {
  x = std::abs(x);
  if (!cubic) {
    return x < T(1) ? T(1) - x : T(0);
  }
  const T a = T(-0.5);
  if (x < T(1)) {
    return cubic_near<T>(x, a);
  }
  return x < T(2) ? cubic_far<T>(x, a) : T(0);
}

/// Support and weights of one antialiased output.
template <typename T>
void set_antialias_taps(Taps& taps, int64_t output, T scale, T support, bool cubic) {
  const T centre = static_cast<T>(scale * (static_cast<double>(output) + 0.5));
  const T inverse = scale >= T(1) ? static_cast<T>(1.0 / scale) : T(1);
  const auto first = std::max<int64_t>(truncate(centre - support + 0.5), 0);
  const auto end = std::min(truncate(centre + support + 0.5), taps.num_rows);
  const int64_t count = std::clamp<int64_t>(end - first, 0, taps.width);
  std::vector<T> weights(static_cast<size_t>(count));
  T total = 0;
  for (int64_t tap = 0; tap < count; ++tap) {
    const T distance = static_cast<T>((static_cast<T>(tap + first) - centre + 0.5) * inverse);
    weights[static_cast<size_t>(tap)] = antialias_filter<T>(distance, cubic);
    total += weights[static_cast<size_t>(tap)];
  }
  const int64_t filler = first + std::max<int64_t>(count - 1, 0);
  for (int64_t tap = 0; tap < taps.width; ++tap) {
    if (tap >= count) {
      set_tap(taps, output, tap, filler, 0.0);  // An own row: reach() does not grow.
      continue;
    }
    const T weight = weights[static_cast<size_t>(tap)];
    set_tap(taps, output, tap, first + tap, total != T(0) ? weight / total : weight);
  }
}

template <typename T>
Taps antialias_taps(int64_t num_rows, int64_t num_outputs, const ResampleOptions& options) {
  const bool cubic = options.mode == ResampleMode::kCubic;
  const T scale = row_scale<T>(num_rows, num_outputs, options);
  const double half = cubic ? 2.0 : 1.0;
  const T support = static_cast<T>(scale >= T(1) ? half * scale : half);
  const int64_t width = static_cast<int64_t>(std::ceil(support)) * 2 + 1;
  Taps taps = empty_taps(num_rows, num_outputs, num_rows == num_outputs ? 1 : width);
  for (int64_t output = 0; output < num_outputs; ++output) {
    if (num_rows == num_outputs) {  // ATen skips the dim, whatever the scale factor says.
      set_tap(taps, output, 0, output, 1.0);
      continue;
    }
    set_antialias_taps<T>(taps, output, scale, support, cubic);
  }
  return taps;
}

template <typename T>
Taps taps_in(int64_t num_rows, int64_t num_outputs, const ResampleOptions& options) {
  switch (options.mode) {
    case ResampleMode::kNearest:
    case ResampleMode::kNearestExact:
      return nearest_taps<T>(num_rows, num_outputs, options);
    case ResampleMode::kLinear:
    case ResampleMode::kCubic:
      break;
  }
  if (options.antialias) {
    return antialias_taps<T>(num_rows, num_outputs, options);
  }
  return options.mode == ResampleMode::kLinear ? linear_taps<T>(num_rows, num_outputs, options)
                                               : cubic_taps<T>(num_rows, num_outputs, options);
}

}  // namespace

bool uses_float_nearest(std::span<const int64_t> output_sizes, int64_t num_channels,
                        bool channels_last) {
  const bool wide_channels_last = channels_last && num_channels > 3;
  if (output_sizes.size() == 2) {
    return wide_channels_last || output_sizes[0] + output_sizes[1] <= 128;
  }
  return output_sizes.size() == 3 && wide_channels_last;
}

int64_t resampled_size(int64_t num_rows, double scale_factor) {
  return static_cast<int64_t>(std::floor(static_cast<double>(num_rows) * scale_factor));
}

Range Taps::reach(Range outputs) const {
  if (outputs.empty()) {
    return {};
  }
  const auto first = index.begin() + outputs.begin * width;
  const auto last = index.begin() + outputs.end * width;
  const auto [low, high] = std::minmax_element(first, last);
  return {*low, *high + 1};
}

Taps resample_taps(int64_t num_rows, int64_t num_outputs, const ResampleOptions& options) {
  require(num_rows >= 1 && num_outputs >= 1,
          "interpolate: expected at least one row and one output, got " + std::to_string(num_rows) +
              " rows and " + std::to_string(num_outputs) + " outputs");
  return options.single_precision ? taps_in<float>(num_rows, num_outputs, options)
                                  : taps_in<double>(num_rows, num_outputs, options);
}

std::vector<MappedPiece> plan_resample(std::span<const int64_t> sizes, const Taps& taps) {
  check_sizes(sizes, "plan_resample");
  const int64_t num_rows = total_of(sizes);
  require(num_rows == taps.num_rows, "plan_resample: expected sizes that add up to " +
                                         std::to_string(taps.num_rows) + " rows, got " +
                                         std::to_string(num_rows));
  const auto rows_crossing = [&](int64_t row, int64_t border) {
    const int64_t before = border > 0 ? taps.reach({border - 1, border}).end : 0;
    const int64_t behind =
        border < taps.num_outputs ? taps.reach({border, border + 1}).begin : num_rows;
    return std::max<int64_t>(before - row, 0) + std::max<int64_t>(row - behind, 0);
  };
  const auto border_of = [&](int64_t row) {
    const int64_t low = floor_div(row * taps.num_outputs, num_rows);
    const int64_t high = ceil_div(row * taps.num_outputs, num_rows);
    return rows_crossing(row, low) < rows_crossing(row, high) ? low : high;
  };
  std::vector<MappedPiece> pieces;
  pieces.reserve(sizes.size());
  for (const Range& outputs : place_outputs(sizes, taps.num_outputs, border_of)) {
    pieces.push_back({outputs, taps.reach(outputs)});
  }
  return pieces;
}

std::vector<MappedPiece> plan_resample_to(std::span<const int64_t> outputs, const Taps& taps) {
  check_sizes(outputs, "plan_resample_to");
  require(total_of(outputs) == taps.num_outputs,
          "plan_resample_to: expected outputs that add up to " + std::to_string(taps.num_outputs) +
              ", got " + std::to_string(total_of(outputs)));
  std::vector<MappedPiece> pieces;
  int64_t begin = 0;
  for (int64_t n : outputs) {
    const Range range{begin, begin + n};
    pieces.push_back({range, taps.reach(range)});
    begin += n;
  }
  return pieces;
}

}  // namespace shardfield::spec
