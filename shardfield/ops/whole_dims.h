#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"

namespace shardfield::ops {

/// x's layout without its cuts on these dims (wrapped, non-negative); nullptr when none is left.
const spec::Layout* without_cuts_on(const spec::Layout& layout, at::IntArrayRef dims);

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
