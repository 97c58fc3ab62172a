#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/exchange/requested_rows.h"
#include "shardfield/spec/layout.h"

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

/// Cuts on the dims [first, first + count) of x gathered on `first`, so that elements in row-major
/// order of these dims come in order of rank. Local.
const spec::Layout* cut_on_first(const at::Tensor& x, int64_t first, int64_t count);

/// Rows of a cut dim of x that every rank asks for by its own piece of `index`.
struct RequestedList {
  std::shared_ptr<const exchange::RequestedRows> rows;  ///< null where this form does not apply
  const spec::Layout* layout = nullptr;                 ///< of x with `dim` replaced by the index's
  std::vector<int64_t> sizes;
  size_t cut = 0;               ///< of x's layout, on `dim`
  std::vector<int> other_axes;  ///< that cut the index but not x: x is the same along them
};

/// Plans the exchange for a sharded index. It applies when x is cut along `dim` by one cut whose
/// axes all cut the index, and no axis of the index cuts another dim of x. Collective.
/// @throws c10::Error on all ranks when some index is out of bounds.
RequestedList request_list(const char* op, const at::Tensor& x, int64_t dim,
                           const at::Tensor& index, bool wraps);

/// How many elements each piece of cut c selected, from every rank's own number. Collective.
std::vector<int64_t> selected_counts(const spec::Layout& layout, size_t c, int64_t mine,
                                     c10::Device device);

}  // namespace shardfield::ops
