#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"

namespace shardfield::ops {

/// Mean and biased variance per channel, over all ranks that share the channel.
struct Moments {
  at::Tensor mean;
  at::Tensor variance;
};

/// The mesh axes of the cuts on dims for which `reduced(dim)` holds and that span several ranks.
template <class Reduced>
std::vector<int> axes_across(const spec::Layout& layout, Reduced&& reduced) {
  std::vector<int> axes;
  for (const spec::Cut& cut : layout.cuts()) {
    if (!reduced(cut.dim)) continue;
    for (int a : cut.axes)
      if (layout.mesh().shape[a] > 1) axes.push_back(a);
  }
  std::sort(axes.begin(), axes.end());
  return axes;
}

/// Statistics accumulate in float for half types, as on one device.
inline at::ScalarType accumulate_type(at::ScalarType type) {
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

/// Per-channel statistics of this rank's rows (1, channels, n) or (batch, channels, ...); zeros
/// where there is nothing. Local.
Moments local_moments(const at::Tensor& rows);

/// Chan's combination of the ranks' (count, mean, M2) over `axes`, exact for uneven and empty
/// pieces; it sends what an all-reduce of two numbers per channel would. `counts` holds each rank's
/// rows per channel in coordinate order of `axes` (see counts_along). Collective over `axes`; not
/// differentiable.
Moments combine_moments(const Moments& own, const std::vector<double>& counts,
                        const spec::Mesh& mesh, const std::vector<int>& axes);

/// Elements that each coordinate on `axes` holds along the dims for which `reduced` is true, with
/// this rank's own coordinate on all other axes. Local.
std::vector<double> counts_along(const spec::Layout& layout, at::IntArrayRef sizes,
                                 const std::vector<bool>& reduced, const std::vector<int>& axes);

/// (rows - mean) / sqrt(variance + eps) * weight + bias per channel of (batch, channels, ...);
/// weight and bias may be undefined. Local.
at::Tensor apply_moments(const at::Tensor& rows, const at::Tensor& mean, const at::Tensor& variance,
                         double eps, const at::Tensor& weight, const at::Tensor& bias);

/// Per channel: sum of dy, and sum of dy times the normalized value, stacked as (2, channels).
/// Local.
at::Tensor gradient_sums(const at::Tensor& dy, const at::Tensor& rows, const at::Tensor& mean,
                         const at::Tensor& inverse_std);

}  // namespace shardfield::ops
