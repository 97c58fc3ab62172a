#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

namespace shardfield::ops {

/// One entry per leading dim of the indexed tensor; undefined where the dim is taken whole.
using IndexList = std::vector<at::Tensor>;

/// Geometry of x[indices] for integer index tensors.
struct IndexShape {
  IndexShape(at::IntArrayRef source, const IndexList& indices);

  std::vector<int> new_dim;          ///< place of each dim of x in the result, -1 when indexed
  std::vector<int64_t> sizes;        ///< sizes of the result
  std::vector<int64_t> index_sizes;  ///< broadcast sizes of the index tensors
  int64_t start = 0;                 ///< where the index dims stand in the result
  int64_t index_dims = 0;            ///< how many they are
};

/// Plain int64 index tensors: sharded ones gathered, masks turned into lists of positions.
/// Collective over the mesh when some index is sharded.
IndexList plain_indices(const at::Tensor& x, const IndexList& indices);

}  // namespace shardfield::ops
