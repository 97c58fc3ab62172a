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

Boxes Boxes::around(const at::Tensor& points, int64_t most) {
  Boxes boxes;
  boxes.dims_ = points.size(1);
  if (points.size(0) == 0) return boxes;
  std::vector<int64_t> rows(static_cast<size_t>(points.size(0)));
  std::iota(rows.begin(), rows.end(), 0);
  const at::Tensor memory = points.contiguous();
  boxes.divide(memory.const_data_ptr<double>(), rows, most);
  return boxes;
}

void Boxes::divide(const double* points, std::span<int64_t> rows, int64_t most) {
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
    return;
  }
  const size_t half = rows.size() / 2;
  std::nth_element(rows.begin(), rows.begin() + static_cast<int64_t>(half), rows.end(),
                   [&](int64_t a, int64_t b) {
                     return points[a * dims_ + longest] < points[b * dims_ + longest];
                   });
  divide(points, rows.first(half), most / 2);
  divide(points, rows.subspan(half), most - most / 2);
}

at::Tensor Boxes::table(int64_t most) const {
  at::Tensor table = at::zeros({most, 2 * dims_ + 1}, at::kDouble);
  auto* entry = table.data_ptr<double>();
  for (size_t b = 0; b < counts_.size(); ++b) {
    entry = std::copy_n(low_.begin() + static_cast<int64_t>(b) * dims_, dims_, entry);
    entry = std::copy_n(high_.begin() + static_cast<int64_t>(b) * dims_, dims_, entry);
    *entry++ = static_cast<double>(counts_[b]);
  }
  return table;
}

Boxes Boxes::from_table(const at::Tensor& table) {
  Boxes boxes;
  boxes.dims_ = (table.size(1) - 1) / 2;
  const at::Tensor memory = table.contiguous();
  const auto* entry = memory.const_data_ptr<double>();
  for (int64_t b = 0; b < table.size(0); ++b, entry += table.size(1)) {
    if (entry[2 * boxes.dims_] == 0) continue;
    boxes.low_.insert(boxes.low_.end(), entry, entry + boxes.dims_);
    boxes.high_.insert(boxes.high_.end(), entry + boxes.dims_, entry + 2 * boxes.dims_);
    boxes.counts_.push_back(static_cast<int64_t>(entry[2 * boxes.dims_]));
  }
  return boxes;
}

double Boxes::squared_distance(const double* point) const {
  double least = kInfinity;
  for (size_t b = 0; b < counts_.size(); ++b) {
    const double* low = low_.data() + static_cast<int64_t>(b) * dims_;
    const double* high = high_.data() + static_cast<int64_t>(b) * dims_;
    double squared = 0;
    for (int64_t d = 0; d < dims_; ++d) {
      const double away = std::max({low[d] - point[d], point[d] - high[d], 0.0});
      squared += away * away;
    }
    least = std::min(least, squared);
  }
  return least;
}

void Boxes::add_reach(const double* point, std::vector<std::pair<double, int64_t>>& reach) const {
  for (size_t b = 0; b < counts_.size(); ++b) {
    const double* low = low_.data() + static_cast<int64_t>(b) * dims_;
    const double* high = high_.data() + static_cast<int64_t>(b) * dims_;
    double squared = 0;
    for (int64_t d = 0; d < dims_; ++d) {
      const double away = std::max(point[d] - low[d], high[d] - point[d]);
      squared += away * away;
    }
    reach.emplace_back(squared, counts_[b]);
  }
}

}  // namespace shardfield::points
