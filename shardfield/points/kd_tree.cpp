#include "shardfield/points/kd_tree.h"

#include <algorithm>

#include <ATen/ATen.h>

#include <nanoflann.hpp>

namespace shardfield::points {

namespace {

/// What nanoflann asks of a set of points.
struct Cloud {
  at::Tensor points;
  at::Tensor numbers;

  size_t kdtree_get_point_count() const { return static_cast<size_t>(points.size(0)); }
  double kdtree_get_pt(size_t row, size_t dim) const {
    return points.const_data_ptr<double>()[static_cast<int64_t>(row) * points.size(1) +
                                           static_cast<int64_t>(dim)];
  }
  template <class Box>
  bool kdtree_get_bbox(Box&) const {
    return false;
  }
};

/// What nanoflann asks of a collector: the best of what it is offered.
class Best {
 public:
  using DistanceType = double;

  Best(const int64_t* numbers, int64_t most, double bound)
      : numbers_(numbers), most_(static_cast<size_t>(most)), bound_(bound) {}

  size_t size() const { return found_.size(); }
  bool full() const { return found_.size() == most_; }
  bool addPoint(double squared, size_t row) {
    if (squared > bound_) return true;
    const Found one{squared, numbers_[row]};
    if (full()) {
      if (!(one < found_.front())) return true;
      std::pop_heap(found_.begin(), found_.end());
      found_.pop_back();
    }
    found_.push_back(one);
    std::push_heap(found_.begin(), found_.end());
    return true;
  }
  /// A little more than the worst: the tree leaves out what equals it, and its own sums round.
  double worstDist() const {
    const double worst = full() ? found_.front().squared : bound_;
    return worst * (1 + 1e-9) + std::numeric_limits<double>::min();
  }
  std::vector<Found> sorted() && {
    std::sort_heap(found_.begin(), found_.end());
    return std::move(found_);
  }

 private:
  const int64_t* numbers_;
  size_t most_;
  double bound_;
  std::vector<Found> found_;
};

using Tree = nanoflann::KDTreeSingleIndexAdaptor<nanoflann::L2_Simple_Adaptor<double, Cloud>, Cloud,
                                                 -1, size_t>;

}  // namespace

struct KdTree::Index {
  Index(const at::Tensor& points, const at::Tensor& numbers)
      : cloud{points.contiguous(), numbers.contiguous()},
        tree(static_cast<int>(points.size(1)), cloud,
             nanoflann::KDTreeSingleIndexAdaptorParams(16)) {}

  Cloud cloud;
  Tree tree;
};

KdTree::KdTree(const at::Tensor& points, const at::Tensor& numbers) {
  if (points.size(0) > 0) index_ = std::make_unique<Index>(points, numbers);
}

KdTree::~KdTree() = default;
KdTree::KdTree(KdTree&&) noexcept = default;
KdTree& KdTree::operator=(KdTree&&) noexcept = default;

std::vector<Found> KdTree::search(const double* query, int64_t most, double bound) const {
  if (!index_ || most <= 0) return {};
  Best best(index_->cloud.numbers.const_data_ptr<int64_t>(), most, bound);
  index_->tree.findNeighbors(best, query, nanoflann::SearchParams());
  return std::move(best).sorted();
}

}  // namespace shardfield::points
