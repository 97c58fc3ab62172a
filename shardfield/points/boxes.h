#pragma once

#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardfield::points {

/// Where a rank's points lie: boxes that hold all of them between them. What other ranks need to
/// know to tell which of their points, or queries, concern this rank.
class Boxes {
 public:
  /// Halves the points at the median of the longest side until each box holds few.
  /// @param points  float64 (n, dims) on the CPU
  /// @param most    boxes at most
  static Boxes around(const at::Tensor& points, int64_t most);

  /// As numbers of a fixed length for a collective: (most, 2 dims + 1), unused ones empty.
  at::Tensor table(int64_t most) const;
  static Boxes from_table(const at::Tensor& table);

  /// Squared distance of a point from the nearest of the boxes; infinite when there is none.
  double squared_distance(const double* point) const;

  /// Adds (squared distance within which all of a box lies, how many points that is) per box.
  void add_reach(const double* point, std::vector<std::pair<double, int64_t>>& reach) const;

 private:
  int64_t dims_ = 0;
  std::vector<double> low_, high_;  ///< dims numbers per box
  std::vector<int64_t> counts_;

  void divide(const double* points, std::span<int64_t> rows, int64_t most);
};

}  // namespace shardfield::points
