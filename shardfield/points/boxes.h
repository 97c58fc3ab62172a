#pragma once

#include <span>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardfield::points {

/// Where a rank's points or queries lie: boxes that hold all of them between them, and how far each
/// box's queries reach. What other ranks need to know to tell which of their points concern it.
class Boxes {
 public:
  /// Halves the rows at the median of the longest side until each box holds few.
  /// @param rows            float64 (n, dims) on the CPU
  /// @param squared_reach   per row; a box takes the largest of its own
  /// @param most            boxes at most
  static Boxes around(const at::Tensor& rows, const std::vector<double>& squared_reach,
                      int64_t most);

  /// As numbers of a fixed length for a collective: (most, 2 dims + 2), unused ones empty.
  at::Tensor table(int64_t most) const;
  static Boxes from_table(const at::Tensor& table);

  /// Squared distance of a point from the nearest of the boxes; infinite when there is none.
  double squared_distance(const double* point) const;
  /// True when the point is within the reach of some box.
  bool reach_to(const double* point) const;
  /// Adds (squared distance within which all of a box lies, how many rows that is) per box.
  void add_extent(const double* point, std::vector<std::pair<double, int64_t>>& extent) const;

 private:
  int64_t dims_ = 0;
  std::vector<double> low_, high_;  ///< dims numbers per box
  std::vector<int64_t> counts_;
  std::vector<double> reach_;

  double squared_distance_from(size_t box, const double* point) const;
  void divide(const double* points, const std::vector<double>& reach, std::span<int64_t> rows,
              int64_t most);
};

}  // namespace shardfield::points
