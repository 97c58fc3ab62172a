#pragma once

#include <map>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"
#include "shardfield/spec/range.h"
#include "shardfield/spec/rows.h"

/// Pieces of ops that work on windows of a cut dim: padding, pooling, interpolation, shuffles.
namespace shardfield::ops {

/// `layout` with other piece sizes on some dims.
const spec::Layout* with_piece_sizes(const spec::Layout& layout,
                                     const std::map<int, std::vector<int64_t>>& sizes_of_dim);

/// `layout` for a result of these sizes when no other rank holds a part: each cut has one piece.
const spec::Layout* layout_when_alone(const spec::Layout& layout, at::IntArrayRef sizes);

/// The rows `needed[piece]` of cut c, from whichever rank owns them. Differentiable. Collective
/// over the cut's ranks.
at::Tensor fetch_rows(const at::Tensor& piece, const spec::Layout& layout, size_t c,
                      const std::vector<spec::Range>& needed);
at::Tensor fetch_rows(const at::Tensor& piece, const spec::Layout& layout, size_t c,
                      std::vector<std::vector<spec::Segment>> wanted);

/// An empty result that hangs on `rows` in the graph, so that the exchanges behind it run their
/// backward on this rank too.
at::Tensor empty_result(const at::Tensor& rows, at::IntArrayRef sizes);

/// x with zeros behind it up to at least these sizes. Differentiable.
at::Tensor grown_to(const at::Tensor& x, at::IntArrayRef least_sizes);

/// Zeros of `sizes` that hang on `dummy`: the result of the stock op on a block grown_to a size it
/// takes. For ops whose backward refers to their input (a product, or PyTorch's zeros_like(self)):
/// the graph then leads to the same inputs as on the other ranks, for derivatives of every order.
at::Tensor empty_result_like(const at::Tensor& dummy, at::IntArrayRef sizes);

/// wrap() in the memory format of `x`, as stock ops keep it; the piece is brought to it too.
at::Tensor wrap_in_format_of(const at::Tensor& x, const at::Tensor& piece,
                             const spec::Layout* layout, at::IntArrayRef sizes);

/// A tensor of these sizes that holds one element: for backward ops that only read the sizes.
at::Tensor sizes_only(const at::Tensor& like, at::IntArrayRef sizes);

/// int64 indices on the device of `like`.
at::Tensor index_tensor(const std::vector<int64_t>& index, const at::Tensor& like);

}  // namespace shardfield::ops
