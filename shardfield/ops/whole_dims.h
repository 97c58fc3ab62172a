#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"

namespace shardfield::ops {

/// x's layout without its cuts on these dims (wrapped, non-negative); nullptr when none is left.
const spec::Layout* without_cuts_on(const spec::Layout& layout, at::IntArrayRef dims);

/// One cut of `dim`, of `size` rows, over all axes that the layout uses, into even pieces.
const spec::Layout* cut_over_all_axes(const spec::Layout& layout, int dim, int64_t size);

/// What a copy in a view's place, and a row of one, is cut by: its longest dim over all axes. A
/// plain tensor could not refuse a write that the source would not see. Null when no dim is longer
/// than 1.
const spec::Layout* cut_of_copy(const spec::Layout& layout, at::IntArrayRef sizes);

/// x in a layout that leaves `dim` whole. A cut on it moves to the longest dim that nothing cuts
/// (an all-to-all: every rank keeps its share) or joins another cut, and is gathered otherwise
/// (reported as a fallback of `op`). Differentiable. Collective
/// when `dim` is cut.
/// @param busy  further dims that must not take the cut
at::Tensor with_whole_dim(const char* op, const at::Tensor& x, int64_t dim,
                          at::IntArrayRef busy = {});

/// x without merged cuts, which only some ops understand: the rows of a merged dim, scattered over
/// the ranks, move to one block per rank. Differentiable. Collective when there is such a dim.
at::Tensor with_simple_cuts(const at::Tensor& x);

}  // namespace shardfield::ops
