#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "shardfield/spec/mesh.h"

/// The second law of the design, kept where programs add up gradients by hand: the gradient of a
/// plain tensor is already summed over the domain, and is the serial one on each of its ranks.
///
/// A sum that backward makes over mesh axes is remembered by its memory and by the plain leaf it is
/// for (behind casts and views). c10d's all-reduce, reduce and reduce-scatter (however they are
/// called: torch.distributed, functional collectives, C++) and `fused_all_reduce` look there first,
/// and refuse to sum it over ranks of the same domain again. Before that the ranks of the domain
/// compare its values: only what is equal on all of them is refused, so that a leaf may also have
/// gradients of a rank's own. Averages of equal values are harmless and pass. A copy of a gradient
/// is not recognised.
namespace shardfield::comm {

/// The mesh axes that a value was summed over during backward.
struct GradientSum {
  const spec::Mesh* mesh = nullptr;
  std::vector<int> axes;
};

/// Remembers `value` as the sum over these axes when a backward runs on this thread. Local.
void remember_gradient_sum(const at::Tensor& value, const spec::Mesh& mesh,
                           const std::vector<int>& axes);

/// What was remembered for the memory that `t` lies in, or for the leaf whose gradient it is.
/// Local.
std::optional<GradientSum> gradient_sum_of(const at::Tensor& t);

/// Global ranks that share this rank's domain under `sum`: those that differ from it only along
/// the summed axes. Empty when c10d does not know the mesh's groups by global ranks. Local.
std::vector<int64_t> domain_ranks(const GradientSum& sum);

/// Whether `t` has the same values on all ranks of its domain, and not zeros alone. Collective over
/// the domain.
bool is_equal_over_domain(const at::Tensor& t, const GradientSum& sum);

/// Refuses the sum of a remembered gradient over a group that holds two ranks of its domain.
/// Collective over the group when the gradient is remembered, else local.
/// @throws c10::Error  naming sizes, rank, domain and group, on every rank of the domain.
void check_summed_once(const at::Tensor& t, c10d::Backend& group, const char* op);

}  // namespace shardfield::comm
