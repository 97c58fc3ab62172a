#include "shardfield/ops/view_geometry.h"

#include <ATen/WrapDimUtils.h>

#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

using at::Tensor;

Tensor viewed(const Tensor& x, const Geometry& g, int64_t offset, int64_t piece_offset) {
  const spec::Layout* layout =
      spec::renumber(tensor::layout_of(x), {g.new_dim.data(), g.new_dim.size()});
  const Tensor& piece = tensor::piece_of(x);
  return tensor::make_view(tensor::strided_piece(piece, g.piece_sizes, g.piece_strides,
                                                 piece.storage_offset() + piece_offset),
                           layout, g.sizes, g.strides, x.storage_offset() + offset, x);
}

bool is_cut(const Tensor& x, int64_t dim) {
  return x.dim() > 0 &&
         tensor::layout_of(x).is_cut(static_cast<int>(at::maybe_wrap_dim(dim, x.dim())));
}

}  // namespace shardfield::ops
