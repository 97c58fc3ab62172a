#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "shardfield/ops/convolution_plan.h"

namespace shardfield::ops {

/// A convolution of a sharded input without a copy of it: the interior comes from the piece itself
/// while the halo travels, the edge outputs from thin slabs. Saves the input, the weight and at
/// most the halo. Backward moves either the halo's gradient or the output gradient's halo, the
/// smaller one (nothing when the input needs no gradient), and sums weight and bias gradients in
/// one message; its own derivative is that of convolve_composed.
/// Collective over the layout's axes. The plan's channels must be whole.
at::Tensor convolve_lean(const at::Tensor& x, const at::Tensor& weight,
                         const std::optional<at::Tensor>& bias,
                         const std::shared_ptr<const ConvPlan>& plan);

}  // namespace shardfield::ops
