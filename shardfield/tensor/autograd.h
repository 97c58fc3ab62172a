#pragma once

#include <ATen/core/Tensor.h>

#include "shardfield/comm/backward_scope.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/spec/layout.h"
#include "shardfield/tensor/shard_tensor_impl.h"

/// The differentiable border between sharded tensors, this rank's pieces and plain tensors.
///
/// Three kinds of value, each with its kind of gradient:
///   sharded    gradient sharded alike;
///   plain      equal on every rank; gradient equal on every rank, already summed;
///   per-rank   a piece or partial result; every rank's gradient is its own.
/// Each function's backward is another function of this file, so any order of derivative works.
/// All are cheap pass-throughs when no gradient is recorded.
namespace shardfield::tensor {

using comm::records_grad;

/// sharded -> per-rank piece. Local; a view of the piece. Backward: wrap.
at::Tensor local(const at::Tensor& x);

/// per-rank piece -> sharded. Local. Backward: local, after moving the gradient to `layout`.
/// @param layout  nullptr returns the piece (nothing is cut).
at::Tensor wrap(const at::Tensor& piece, const spec::Layout* layout, at::IntArrayRef sizes,
                at::MemoryFormat format = at::MemoryFormat::Contiguous);

/// plain -> per-rank: a replicated weight enters a rank's own computation. Local.
/// Backward: sum over the layout's mesh axes.
at::Tensor enter(const at::Tensor& plain, const spec::Layout& layout);
std::optional<at::Tensor> enter(const std::optional<at::Tensor>& plain, const spec::Layout& layout);
/// As above over chosen axes; also for a per-rank value that is equal along them.
at::Tensor enter(const at::Tensor& plain, const spec::Mesh& mesh, const std::vector<int>& axes);

/// per-rank partial sums -> plain. Collective over the layout's axes. Backward: identity (local).
at::Tensor reduce_sum(const at::Tensor& partial, const spec::Layout& layout);
at::Tensor reduce_sum(const at::Tensor& partial, const spec::Mesh& mesh,
                      const std::vector<int>& axes);

/// sharded -> plain. Collective. Backward: this rank's slice (local). Plain tensors pass through.
at::Tensor gather(const at::Tensor& x);

/// plain -> sharded. Local. Backward: gather (collective).
at::Tensor scatter_like(const at::Tensor& plain, const spec::Layout* layout);

/// Any tensor to a layout (nullptr: plain): nothing, scatter_like, gather or an all-to-all.
/// Differentiable. @throws c10::Error when the tensor lives on another mesh.
at::Tensor redistribute(const at::Tensor& x, const spec::Layout* layout);

/// This rank's piece of any tensor under `layout`; dims of size 1 in t where the layout cuts a
/// longer dim of `sizes` (broadcasting, aligned right) stay whole. Differentiable: the gradient of
/// a plain tensor is summed or gathered to its full plain value.
at::Tensor piece_for(const at::Tensor& t, const spec::Layout& layout, at::IntArrayRef sizes);

/// Layout as it looks from a tensor of fewer or broadcast dims (aligned right): cuts on dims that
/// t lacks or has with size 1 are dropped; nullptr when none is left.
const spec::Layout* layout_for_operand(const spec::Layout& layout, at::IntArrayRef sizes,
                                       at::IntArrayRef operand_sizes);

}  // namespace shardfield::tensor
