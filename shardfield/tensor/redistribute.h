#pragma once

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"

namespace shardfield::tensor {

/// Moves this rank's piece of a tensor from one layout to another, without autograd; nullptr is
/// the plain (replicated) form on either side. Sends every element once to each rank that needs
/// and lacks it: shard to shard is an uneven all-to-all of the box intersections, shard to plain
/// an all-gather, plain to shard a local copy. Collective over the mesh unless `from` is plain.
/// @return a fresh piece, or the piece itself when the layouts are one.
at::Tensor redistribute_piece(const at::Tensor& piece, const spec::Layout* from,
                              const spec::Layout* to, at::IntArrayRef sizes);

/// The part of a full tensor that `coord` owns, as a view whose cut dims are split into their
/// factors; writing to it writes to `full`. A piece takes that shape by `piece.view(sizes)` or
/// reshape.
at::Tensor block_view(const at::Tensor& full, const spec::Layout& layout,
                      const std::vector<int64_t>& coord);

/// This rank's part of a full tensor: a view when every cut is simple, else a copy. Local.
at::Tensor slice_piece(const at::Tensor& full, const spec::Layout& layout);

}  // namespace shardfield::tensor
