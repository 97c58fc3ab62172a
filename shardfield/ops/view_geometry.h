#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::ops {

using Sizes = c10::SmallVector<int64_t, 5>;

/// Sizes and strides being rewritten, outside and of the piece alike, and where each old dim goes:
/// what most views come down to.
struct Geometry {
  Sizes sizes, strides;
  Sizes piece_sizes, piece_strides;
  c10::SmallVector<int, 8> new_dim;

  explicit Geometry(const at::Tensor& x)
      : sizes(x.sizes().begin(), x.sizes().end()),
        strides(x.strides().begin(), x.strides().end()),
        piece_sizes(tensor::piece_of(x).sizes().begin(), tensor::piece_of(x).sizes().end()),
        piece_strides(tensor::piece_of(x).strides().begin(), tensor::piece_of(x).strides().end()) {
    for (int d = 0; d < x.dim(); ++d) new_dim.push_back(d);
  }
  void erase(int64_t d) {
    for (Sizes* v : {&sizes, &strides, &piece_sizes, &piece_strides}) v->erase(v->begin() + d);
    for (int& k : new_dim) k = k == d ? -1 : k > d ? k - 1 : k;
  }
  void insert_one(int64_t d) {
    const bool last = d == static_cast<int64_t>(sizes.size());
    const int64_t outer = last ? 1 : sizes[d] * strides[d];
    const int64_t inner = last ? 1 : piece_sizes[d] * piece_strides[d];
    sizes.insert(sizes.begin() + d, 1);
    strides.insert(strides.begin() + d, outer);
    piece_sizes.insert(piece_sizes.begin() + d, 1);
    piece_strides.insert(piece_strides.begin() + d, inner);
    for (int& k : new_dim) k += k >= d;
  }
  void swap_dims(int64_t a, int64_t b) {
    for (Sizes* v : {&sizes, &strides, &piece_sizes, &piece_strides}) std::swap((*v)[a], (*v)[b]);
    std::swap(new_dim[a], new_dim[b]);
  }
};

/// The view of x with this geometry. Offsets in elements, added to those of x and of its piece.
at::Tensor viewed(const at::Tensor& x, const Geometry& g, int64_t offset = 0,
                  int64_t piece_offset = 0);

/// Whether something cuts this dim of x, which may be counted from the end.
bool is_cut(const at::Tensor& x, int64_t dim);

}  // namespace shardfield::ops
