#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/OptionalArrayRef.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/spec/layout.h"

namespace shardfield::ops {

/// A reduction of a sharded tensor over some dims: which dims, which mesh axes take part, and what
/// layout and sizes the result has.
struct ReducedDims {
  /// @param dims  empty or absent means all dims, as in PyTorch.
  ReducedDims(const at::Tensor& x, at::OptionalIntArrayRef dims, bool keepdim);

  std::vector<int64_t> dims;   ///< wrapped, ascending
  std::vector<int> axes;       ///< mesh axes of the cuts that are reduced away
  const spec::Layout* source;  ///< layout of the input
  const spec::Layout* layout;  ///< layout of the result; nullptr when plain
  std::vector<int64_t> sizes;  ///< global sizes of the result
  bool keepdim;

  bool crosses_ranks() const { return !axes.empty(); }
  /// Elements of the input that go into one result element, over all ranks.
  int64_t count(const at::Tensor& x) const;
  /// Wraps a result that needs nothing more from other ranks. Differentiable.
  at::Tensor finish(const at::Tensor& partial) const;
  /// Every rank's partial result along a new dim 0, for combinations other than sums; equal on the
  /// ranks of `axes`. Differentiable. Collective over those axes.
  at::Tensor stack_partials(const at::Tensor& partial) const;
  /// A value known already, with the gradient weight * grad at every element of the piece (the
  /// weights are constants, as in PyTorch's formulas for extrema and medians). Local.
  at::Tensor pick(const at::Tensor& piece, const at::Tensor& weight, const at::Tensor& value) const;
  /// Reduces without autograd. Collective over `axes`.
  at::Tensor combine(const at::Tensor& partial, comm::Reduction reduction) const;
  /// A result with the reduced dims present, size 1.
  at::Tensor keep_dims(const at::Tensor& partial) const;
  /// Sums the ranks' partial results over `axes`, then finish. Collective over those axes.
  at::Tensor finish_sum(const at::Tensor& partial) const;
};

}  // namespace shardfield::ops
