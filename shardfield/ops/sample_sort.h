#pragma once

#include <ATen/core/Tensor.h>

namespace shardfield::ops {

/// The order of a sharded vector.
struct SortedVector {
  at::Tensor values;   ///< sharded; differentiable in the vector
  at::Tensor indices;  ///< sharded alike, int64
};

/// Sorts a 1-d sharded tensor with one simple cut, equal values in order of their index and NaN as
/// the largest, as at::sort does with stable = true. No rank holds more than twice its share and
/// every element travels once (H. Shi and J. Schaeffer, Parallel sorting by regular sampling, J.
/// Parallel Distrib. Comput. 14, 1992). The result is cut by what each rank ends up with.
/// Collective.
SortedVector sample_sort(const at::Tensor& x, bool descending);

}  // namespace shardfield::ops
