#include "shardfield/graph/curve.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>

#include "shardfield/graph/parallel.h"

namespace shardfield::graph {

namespace {

constexpr uint32_t kTopCell = (uint32_t{1} << kCurveBits) - 1;

/// Skilling's transform works level by level from the top bit: what it does to the lower bits is
/// a permutation of the axes, a flip of some, and a flip of the digit. Those are the states here.
struct CurveState {
  std::array<int, 3> axis{0, 1, 2};
  std::array<bool, 3> flip{};
  bool parity = false;
  friend bool operator==(const CurveState&, const CurveState&) = default;
};

constexpr int kMostStates = 96;

/// step[state][x y z bits] = next state * 8 + three key bits.
struct HilbertTable {
  std::array<std::array<uint16_t, 8>, kMostStates> step{};
  HilbertTable();
};

/// One level: key digit of these bits, and the state for the level below.
int descend(CurveState& state, int bits) {
  std::array<bool, 3> b{};
  for (size_t i = 0; i < 3; ++i) {
    b[i] = (((bits >> (2 - state.axis[i])) & 1) != 0) != state.flip[i];
  }
  for (size_t i = 0; i < 3; ++i) {
    if (b[i]) {
      state.flip[0] = !state.flip[0];
    } else {
      std::swap(state.axis[0], state.axis[i]);
      std::swap(state.flip[0], state.flip[i]);
    }
  }
  const std::array<bool, 3> gray{b[0], b[0] != b[1], (b[0] != b[1]) != b[2]};
  int digit = 0;
  for (size_t i = 0; i < 3; ++i) digit = digit * 2 + static_cast<int>(gray[i] != state.parity);
  state.parity = state.parity != gray[2];
  return digit;
}

HilbertTable::HilbertTable() {
  std::vector<CurveState> states{CurveState{}};
  for (size_t s = 0; s < states.size(); ++s) {
    for (int bits = 0; bits < 8; ++bits) {
      CurveState next = states[s];
      const int digit = descend(next, bits);
      const auto found = std::find(states.begin(), states.end(), next);
      const auto number = found - states.begin();
      if (found == states.end()) states.push_back(next);
      step[s][static_cast<size_t>(bits)] = static_cast<uint16_t>(number * 8 + digit);
    }
  }
}

const HilbertTable& hilbert_table() {
  static const HilbertTable table;
  return table;
}

/// Bits of x, y and z at one level as one digit.
size_t digit_of(const std::array<uint32_t, 3>& p, int level) {
  return ((p[0] >> level) & 1U) << 2 | ((p[1] >> level) & 1U) << 1 | ((p[2] >> level) & 1U);
}

struct Box {
  std::array<double, 3> low{};
  std::array<double, 3> scale{};
};

/// Box of the centers of all ranks.
Box box_of(std::span<const double> centers, CurveBox shape, const Together& together) {
  std::array<double, 6> ends{};  // low corner with its sign turned, high corner
  ends.fill(-std::numeric_limits<double>::infinity());
  for (size_t i = 0; i < centers.size(); i += 3) {
    for (size_t axis = 0; axis < 3; ++axis) {
      ends[axis] = std::max(ends[axis], -centers[i + axis]);
      ends[axis + 3] = std::max(ends[axis + 3], centers[i + axis]);
    }
  }
  together.max(ends);
  double longest = 0;
  for (size_t axis = 0; axis < 3; ++axis) longest = std::max(longest, ends[axis + 3] + ends[axis]);
  Box box;
  for (size_t axis = 0; axis < 3; ++axis) {
    const double extent = shape == CurveBox::cubic ? longest : ends[axis + 3] + ends[axis];
    box.low[axis] = -ends[axis];
    box.scale[axis] = extent > 0 ? kTopCell / extent : 0;
  }
  return box;
}

std::array<uint32_t, 3> grid_point(const double* center, const Box& box) {
  std::array<uint32_t, 3> point{};
  for (size_t axis = 0; axis < 3; ++axis) {
    const double place = (center[axis] - box.low[axis]) * box.scale[axis] + 0.5;
    point[axis] = std::min(kTopCell, static_cast<uint32_t>(place));
  }
  return point;
}

std::vector<uint64_t> keys_in(const Box& box, std::span<const double> centers, Curve curve,
                              int num_threads) {
  std::vector<uint64_t> keys(centers.size() / 3);
  parallel_ranges(static_cast<int64_t>(keys.size()), num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const auto point = grid_point(centers.data() + i * 3, box);
      keys[static_cast<size_t>(i)] =
          curve == Curve::hilbert ? hilbert_key(point) : morton_key(point);
    }
  });
  return keys;
}

struct KeyedCell {
  uint64_t key;
  int64_t cell;
  friend auto operator<=>(const KeyedCell&, const KeyedCell&) = default;
};

/// Sorted by (key, cell): a total order, so the threads cannot show in the result.
void sort_cells(std::vector<KeyedCell>& cells, int num_threads) {
  const auto count = static_cast<int64_t>(cells.size());
  const int64_t runs = count < 65536 ? 1 : thread_count(num_threads);
  const auto at = [&](int64_t run) { return cells.begin() + count * std::min(run, runs) / runs; };
  parallel_items(runs, num_threads, [&](int64_t run, int) { std::sort(at(run), at(run + 1)); });
  for (int64_t width = 1; width < runs; width *= 2) {
    parallel_items((runs + 2 * width - 1) / (2 * width), num_threads, [&](int64_t pair, int) {
      const int64_t first = pair * 2 * width;
      std::inplace_merge(at(first), at(first + width), at(first + 2 * width));
    });
  }
}

constexpr int kBucketBits = 18;
constexpr int kBucketShift = 3 * kCurveBits - kBucketBits;

/// Number of keys before each value of their top bits, over all ranks.
std::vector<int64_t> bucket_starts(std::span<const uint64_t> keys, const Together& together,
                                   int num_threads) {
  std::vector<std::atomic<int64_t>> counts(size_t{1} << kBucketBits);
  parallel_ranges(static_cast<int64_t>(keys.size()), num_threads, [&](int64_t begin, int64_t end) {
    std::vector<int32_t> own(counts.size());
    for (int64_t i = begin; i < end; ++i) ++own[keys[static_cast<size_t>(i)] >> kBucketShift];
    for (size_t b = 0; b < own.size(); ++b) {
      if (own[b] != 0) counts[b] += own[b];
    }
  });
  std::vector<int64_t> starts(counts.begin(), counts.end());
  together.sum(starts);
  int64_t before = 0;
  for (int64_t& start : starts) before += std::exchange(start, before);
  starts.push_back(before);
  return starts;
}

/// The cells of all ranks whose bucket is cut, in order along the curve.
std::vector<KeyedCell> gather_cells(const std::vector<KeyedCell>& own, const Together& together,
                                    int num_threads) {
  std::vector<int64_t> numbers;
  numbers.reserve(own.size() * 2);
  for (const KeyedCell& cell : own) {
    numbers.push_back(static_cast<int64_t>(cell.key));
    numbers.push_back(cell.cell);
  }
  const std::vector<int64_t> all = together.gather(numbers);
  std::vector<KeyedCell> cells(all.size() / 2);
  for (size_t i = 0; i < cells.size(); ++i) {
    cells[i] = {static_cast<uint64_t>(all[2 * i]), all[2 * i + 1]};
  }
  sort_cells(cells, num_threads);
  return cells;
}

/// Part of each bucket that lies in one part; -1 for those that a border cuts.
std::vector<int32_t> parts_of_buckets(const std::vector<int64_t>& starts, int64_t num_parts) {
  std::vector<int32_t> parts(starts.size() - 1, -1);
  for (size_t b = 0; b + 1 < starts.size(); ++b) {
    if (starts[b] == starts[b + 1]) continue;
    const int64_t first = starts[b] * num_parts / starts.back();
    const int64_t last = (starts[b + 1] - 1) * num_parts / starts.back();
    if (first == last) parts[b] = static_cast<int32_t>(first);
  }
  return parts;
}

/// Only the cells of buckets that a border cuts need sorting; the others know their part at once.
///
/// @param first_cell  number of this rank's first cell
std::vector<int32_t> cut_evenly(std::span<const uint64_t> keys, int64_t first_cell,
                                int64_t num_parts, const Together& together, int num_threads) {
  const auto count = static_cast<int64_t>(keys.size());
  const std::vector<int64_t> starts = bucket_starts(keys, together, num_threads);
  const std::vector<int32_t> part_of_bucket = parts_of_buckets(starts, num_parts);
  std::vector<int32_t> labels(keys.size());
  parallel_ranges(count, num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      labels[static_cast<size_t>(i)] = part_of_bucket[keys[static_cast<size_t>(i)] >> kBucketShift];
    }
  });
  std::vector<KeyedCell> undecided;
  for (int64_t i = 0; i < count; ++i) {
    if (labels[static_cast<size_t>(i)] >= 0) continue;
    undecided.push_back({keys[static_cast<size_t>(i)], first_cell + i});
  }
  undecided = gather_cells(undecided, together, num_threads);
  int64_t rank = 0;
  for (size_t i = 0; i < undecided.size(); ++i) {
    const uint64_t bucket = undecided[i].key >> kBucketShift;
    rank = i > 0 && undecided[i - 1].key >> kBucketShift == bucket ? rank + 1 : starts[bucket];
    const int64_t here = undecided[i].cell - first_cell;
    if (here < 0 || here >= count) continue;
    labels[static_cast<size_t>(here)] = static_cast<int32_t>(rank * num_parts / starts.back());
  }
  return labels;
}

}  // namespace

uint64_t hilbert_key(const std::array<uint32_t, 3>& point) {
  const HilbertTable& table = hilbert_table();
  uint64_t key = 0;
  size_t state = 0;
  for (int level = kCurveBits - 1; level >= 0; --level) {
    const uint16_t step = table.step[state][digit_of(point, level)];
    key = key << 3 | (step & 7U);
    state = step >> 3;
  }
  return key;
}

uint64_t morton_key(const std::array<uint32_t, 3>& point) {
  uint64_t key = 0;
  for (int level = kCurveBits - 1; level >= 0; --level) key = key << 3 | digit_of(point, level);
  return key;
}

Together alone() {
  return {
      [](std::span<double>) {}, [](std::span<int64_t>) {}, [](int64_t) { return int64_t{0}; },
      [](std::span<const int64_t> own) { return std::vector<int64_t>(own.begin(), own.end()); }};
}

std::vector<uint64_t> curve_keys(std::span<const double> centers, Curve curve, CurveBox shape,
                                 int num_threads) {
  return keys_in(box_of(centers, shape, alone()), centers, curve, num_threads);
}

std::vector<int32_t> cut_ranges(std::span<const double> centers, Curve curve, CurveBox shape,
                                int64_t num_parts, const Together& together, int num_threads) {
  const auto count = static_cast<int64_t>(centers.size() / 3);
  const Box box = box_of(centers, shape, together);
  const std::vector<uint64_t> keys = keys_in(box, centers, curve, num_threads);
  return cut_evenly(keys, together.first(count), num_parts, together, num_threads);
}

std::vector<int64_t> order_of(std::span<const uint64_t> keys, int num_threads) {
  std::vector<KeyedCell> cells(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) cells[i] = {keys[i], static_cast<int64_t>(i)};
  sort_cells(cells, num_threads);
  std::vector<int64_t> order(keys.size());
  for (size_t i = 0; i < keys.size(); ++i) order[i] = cells[i].cell;
  return order;
}

std::vector<int32_t> cut_order(std::span<const uint64_t> keys, std::span<const double> weights,
                               int64_t num_parts, int num_threads) {
  if (weights.empty()) return cut_evenly(keys, 0, num_parts, alone(), num_threads);
  double total = 0;
  for (const double w : weights) total += w;
  std::vector<int32_t> labels(keys.size());
  double before = 0;
  for (const int64_t cell : order_of(keys, num_threads)) {
    const double w = weights[static_cast<size_t>(cell)];
    const double middle = (before + w / 2) * static_cast<double>(num_parts) / total;
    labels[static_cast<size_t>(cell)] =
        static_cast<int32_t>(std::clamp<int64_t>(static_cast<int64_t>(middle), 0, num_parts - 1));
    before += w;
  }
  return labels;
}

}  // namespace shardfield::graph
