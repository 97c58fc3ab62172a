#include "shardfield/points/boxes.h"

#include <algorithm>
#include <limits>
#include <numeric>

#include <ATen/ATen.h>

namespace shardfield::points {

namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kFewPoints = 16;

}  // namespace

Boxes Boxes::around(const at::Tensor& rows, const std::vector<double>& squared_reach,
                    int64_t most) {
  Boxes boxes;
  boxes.dims_ = rows.size(1);
  if (rows.size(0) == 0) return boxes;
  std::vector<int64_t> all(static_cast<size_t>(rows.size(0)));
  std::iota(all.begin(), all.end(), 0);
  const at::Tensor memory = rows.contiguous();
  boxes.divide(memory.const_data_ptr<double>(), squared_reach, all, most);
  return boxes;
}

void Boxes::divide(const double* points, const std::vector<double>& reach, std::span<int64_t> rows,
                   int64_t most) {
  std::vector<double> low(static_cast<size_t>(dims_), kInfinity);
  std::vector<double> high(static_cast<size_t>(dims_), -kInfinity);
  for (const int64_t row : rows) {
    for (int64_t d = 0; d < dims_; ++d) {
      low[d] = std::min(low[d], points[row * dims_ + d]);
      high[d] = std::max(high[d], points[row * dims_ + d]);
    }
  }
  int64_t longest = 0;
  for (int64_t d = 1; d < dims_; ++d)
    if (high[d] - low[d] > high[longest] - low[longest]) longest = d;
  const auto count = static_cast<int64_t>(rows.size());
  if (most < 2 || count <= kFewPoints || dims_ == 0 || high[longest] == low[longest]) {
    low_.insert(low_.end(), low.begin(), low.end());
    high_.insert(high_.end(), high.begin(), high.end());
    counts_.push_back(count);
    double farthest = 0;
    for (const int64_t row : rows) farthest = std::max(farthest, reach[static_cast<size_t>(row)]);
    reach_.push_back(farthest);
    return;
  }
  const size_t half = rows.size() / 2;
  std::nth_element(rows.begin(), rows.begin() + static_cast<int64_t>(half), rows.end(),
                   [&](int64_t a, int64_t b) {
                     return points[a * dims_ + longest] < points[b * dims_ + longest];
                   });
  divide(points, reach, rows.first(half), most / 2);
  divide(points, reach, rows.subspan(half), most - most / 2);
}

at::Tensor Boxes::table(int64_t most) const {
  at::Tensor table = at::zeros({most, 2 * dims_ + 2}, at::kDouble);
  auto* entry = table.data_ptr<double>();
  for (size_t b = 0; b < counts_.size(); ++b) {
    entry = std::copy_n(low_.begin() + static_cast<int64_t>(b) * dims_, dims_, entry);
    entry = std::copy_n(high_.begin() + static_cast<int64_t>(b) * dims_, dims_, entry);
    *entry++ = static_cast<double>(counts_[b]);
    *entry++ = reach_[b];
  }
  return table;
}

Boxes Boxes::from_table(const at::Tensor& table) {
  Boxes boxes;
  boxes.dims_ = (table.size(1) - 2) / 2;
  const at::Tensor memory = table.contiguous();
  const auto* entry = memory.const_data_ptr<double>();
  for (int64_t b = 0; b < table.size(0); ++b, entry += table.size(1)) {
    if (entry[2 * boxes.dims_] == 0) continue;
    boxes.low_.insert(boxes.low_.end(), entry, entry + boxes.dims_);
    boxes.high_.insert(boxes.high_.end(), entry + boxes.dims_, entry + 2 * boxes.dims_);
    boxes.counts_.push_back(static_cast<int64_t>(entry[2 * boxes.dims_]));
    boxes.reach_.push_back(entry[2 * boxes.dims_ + 1]);
  }
  return boxes;
}

double Boxes::squared_distance_from(size_t box, const double* point) const {
  const double* low = low_.data() + static_cast<int64_t>(box) * dims_;
  const double* high = high_.data() + static_cast<int64_t>(box) * dims_;
  double squared = 0;
  for (int64_t d = 0; d < dims_; ++d) {
    const double away = std::max({low[d] - point[d], point[d] - high[d], 0.0});
    squared += away * away;
  }
  return squared;
}

double Boxes::squared_distance(const double* point) const {
  double least = kInfinity;
  for (size_t b = 0; b < counts_.size(); ++b)
    least = std::min(least, squared_distance_from(b, point));
  return least;
}

bool Boxes::reach_to(const double* point) const {
  for (size_t b = 0; b < counts_.size(); ++b)
    if (squared_distance_from(b, point) <= reach_[b]) return true;
  return false;
}

void Boxes::add_extent(const double* point, std::vector<std::pair<double, int64_t>>& extent) const {
  for (size_t b = 0; b < counts_.size(); ++b) {
    const double* low = low_.data() + static_cast<int64_t>(b) * dims_;
    const double* high = high_.data() + static_cast<int64_t>(b) * dims_;
    double squared = 0;
    for (int64_t d = 0; d < dims_; ++d) {
      const double away = std::max(point[d] - low[d], high[d] - point[d]);
      squared += away * away;
    }
    extent.emplace_back(squared, counts_[b]);
  }
}

}  // namespace shardfield::points
