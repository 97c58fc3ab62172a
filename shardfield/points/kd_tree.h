#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace shardfield::points {

/// A point that a search found: squared distance, then number, which is also the order of results.
/// Distances are those of float64 coordinates, so the order does not depend on who searched.
struct Found {
  double squared = 0;
  int64_t number = 0;

  friend bool operator<(const Found& a, const Found& b) {
    return a.squared != b.squared ? a.squared < b.squared : a.number < b.number;
  }
};

/// Points in a tree (nanoflann's k-d tree; Bentley, "Multidimensional binary search trees used for
/// associative searching", 1975). Searches are exact, ties included. Local.
class KdTree {
 public:
  /// @param points   float64 (n, dims) on the CPU, finite
  /// @param numbers  int64 (n), what the points are called in results
  KdTree(const at::Tensor& points, const at::Tensor& numbers);
  ~KdTree();
  KdTree(KdTree&&) noexcept;
  KdTree& operator=(KdTree&&) noexcept;
  KdTree(const KdTree&) = delete;
  KdTree& operator=(const KdTree&) = delete;

  static constexpr int64_t kAll = std::numeric_limits<int64_t>::max();

  /// The first `most` points in the order of Found whose squared distance is at most `bound`.
  /// @param query  dims coordinates
  std::vector<Found> search(const double* query, int64_t most, double bound) const;

 private:
  struct Index;
  std::unique_ptr<Index> index_;
};

}  // namespace shardfield::points
