#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"

namespace shardfield::tensor {

/// A sharded tensor from one rank that holds all of it; each rank is sent its piece only.
/// Collective over the mesh. Not differentiable.
/// @param full    the tensor on mesh rank `source`, nothing elsewhere
/// @param sizes   global sizes, equal on all ranks
/// @param layout  nullptr: every rank gets a full plain copy
at::Tensor scatter_from(const std::optional<at::Tensor>& full, const spec::Layout* layout,
                        at::IntArrayRef sizes, at::ScalarType dtype, int source);

/// Cuts a tensor that every rank holds, torch.chunk rule, dim d along mesh axis placements[d].axis.
/// Local; differentiable.
/// @param dims  tensor dim per mesh axis, -1 leaves the axis replicated
at::Tensor shard_tensor(const at::Tensor& full, const spec::Mesh& mesh,
                        const std::vector<int>& dims);

/// The layout of a tensor of `sizes` cut by the torch.chunk rule. Two axes on one dim cut it once
/// by the first and each piece again by the second.
const spec::Layout* chunk_layout(const spec::Mesh& mesh, const std::vector<int>& dims,
                                 at::IntArrayRef sizes);

/// All of a sharded tensor on every rank; plain tensors pass. Collective; differentiable.
at::Tensor full_tensor(const at::Tensor& x);
/// This rank's piece. Local; differentiable.
at::Tensor to_local(const at::Tensor& x);

}  // namespace shardfield::tensor
