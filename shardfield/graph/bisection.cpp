#include "shardfield/graph/bisection.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <numeric>

#include "shardfield/graph/curve.h"
#include "shardfield/graph/parallel.h"

namespace shardfield::graph {

namespace {

/// A center on a grid so fine that only rounding noise is lost: cells of one plane of a regular
/// mesh get one number.
struct Item {
  std::array<int64_t, 3> place;
  int64_t cell;
};

/// A run of items that is to become the parts first_part .. first_part + num_parts - 1.
struct Task {
  int64_t begin, end;
  int64_t first_part, num_parts;
};

std::vector<Item> items_of(std::span<const double> centers, int num_threads) {
  constexpr double kFinest = 679'000'000'000.123;  // about 2^39; no simple fraction of it is whole
  std::array<double, 3> low{};
  std::array<double, 3> high{};
  low.fill(std::numeric_limits<double>::infinity());
  high.fill(-std::numeric_limits<double>::infinity());
  for (size_t i = 0; i < centers.size(); ++i) {
    low[i % 3] = std::min(low[i % 3], centers[i]);
    high[i % 3] = std::max(high[i % 3], centers[i]);
  }
  const double extent = std::max({high[0] - low[0], high[1] - low[1], high[2] - low[2]});
  const double scale = extent > 0 ? kFinest / extent : 0;
  std::vector<Item> items(centers.size() / 3);
  parallel_ranges(static_cast<int64_t>(items.size()), num_threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Item& item = items[static_cast<size_t>(i)];
      item.cell = i;
      for (size_t axis = 0; axis < 3; ++axis) {
        const double x = centers[static_cast<size_t>(i) * 3 + axis];
        item.place[axis] = std::llround((x - low[axis]) * scale);
      }
    }
  });
  return items;
}

/// Axes by falling extent of these items.
std::array<size_t, 3> axes_by_extent(std::span<const Item> items) {
  std::array<int64_t, 3> low{};
  std::array<int64_t, 3> high{};
  low.fill(std::numeric_limits<int64_t>::max());
  high.fill(std::numeric_limits<int64_t>::min());
  for (const Item& item : items) {
    for (size_t axis = 0; axis < 3; ++axis) {
      low[axis] = std::min(low[axis], item.place[axis]);
      high[axis] = std::max(high[axis], item.place[axis]);
    }
  }
  std::array<size_t, 3> axes{0, 1, 2};
  constexpr int64_t kNoise = 64;  // boxes that differ by less are cubes
  std::stable_sort(axes.begin(), axes.end(), [&](size_t a, size_t b) {
    return (high[a] - low[a]) / kNoise > (high[b] - low[b]) / kNoise;
  });
  return axes;
}

/// Puts the items below the cut first and says where it is.
int64_t cut(std::vector<Item>& items, const Task& task, std::span<const double> weights,
            int64_t num_cells, int64_t num_parts) {
  const auto begin = items.begin() + task.begin;
  const auto end = items.begin() + task.end;
  const auto axes = axes_by_extent({begin, end});
  const auto before = [&axes](const Item& a, const Item& b) {
    for (const size_t axis : axes) {
      if (a.place[axis] != b.place[axis]) return a.place[axis] < b.place[axis];
    }
    return a.cell < b.cell;
  };
  const int64_t left_parts = task.num_parts / 2;
  if (weights.empty()) {
    const int64_t at = even_border(task.first_part + left_parts, num_cells, num_parts);
    if (at > task.begin && at < task.end) std::nth_element(begin, items.begin() + at, end, before);
    return at;
  }
  std::sort(begin, end, before);
  double total = 0;
  for (auto it = begin; it != end; ++it) total += weights[static_cast<size_t>(it->cell)];
  const double wanted =
      total * static_cast<double>(left_parts) / static_cast<double>(task.num_parts);
  double sum = 0;
  int64_t at = task.begin;
  for (auto it = begin; it != end; ++it, ++at) {
    const double w = weights[static_cast<size_t>(it->cell)];
    if (sum + w / 2 >= wanted) break;
    sum += w;
  }
  return at;
}

}  // namespace

std::vector<int32_t> bisect(std::span<const double> centers, std::span<const double> weights,
                            int64_t num_parts, int num_threads) {
  std::vector<Item> items = items_of(centers, num_threads);
  const auto count = static_cast<int64_t>(items.size());
  std::vector<int32_t> labels(items.size());
  std::vector<Task> level{{0, count, 0, num_parts}};
  while (!level.empty()) {
    std::vector<std::array<Task, 2>> halves(level.size());
    parallel_items(static_cast<int64_t>(level.size()), num_threads, [&](int64_t i, int) {
      const Task& task = level[static_cast<size_t>(i)];
      if (task.num_parts == 1) {
        for (int64_t k = task.begin; k < task.end; ++k) {
          labels[static_cast<size_t>(items[static_cast<size_t>(k)].cell)] =
              static_cast<int32_t>(task.first_part);
        }
        return;
      }
      const int64_t at = cut(items, task, weights, count, num_parts);
      const int64_t left = task.num_parts / 2;
      halves[static_cast<size_t>(i)] = {
          {{task.begin, at, task.first_part, left},
           {at, task.end, task.first_part + left, task.num_parts - left}}};
    });
    std::vector<Task> next;
    for (const auto& pair : halves) {
      for (const Task& task : pair) {
        if (task.end > task.begin) next.push_back(task);
      }
    }
    level = std::move(next);
  }
  return labels;
}

}  // namespace shardfield::graph
