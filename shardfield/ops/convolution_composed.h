#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

#include "shardfield/ops/convolution_plan.h"

namespace shardfield::ops {

/// A convolution of a sharded input out of differentiable parts: rows of every cut dim are
/// exchanged, the plain op runs on them, and its result is wrapped. Right for every order of
/// derivative. Collective over the layout's axes.
///
/// @param x       (N, C, spatial...) under plan.input
/// @param weight  plain; its gradient comes out summed over ranks
/// @param bias    plain, or absent
at::Tensor convolve_composed(const at::Tensor& x, const at::Tensor& weight,
                             const std::optional<at::Tensor>& bias, const ConvPlan& plan);

/// The plain op with padding of its own on either side of each dim. Local.
at::Tensor convolve_plain(const at::Tensor& x, const at::Tensor& weight,
                          const std::optional<at::Tensor>& bias, const ConvSettings& settings);

/// Memory format of a convolution's result, as one device chooses it.
at::MemoryFormat conv_format(const at::Tensor& x, const at::Tensor& weight);

}  // namespace shardfield::ops
