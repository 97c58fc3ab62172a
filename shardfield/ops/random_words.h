#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"

namespace shardfield::ops {

/// Random values of a tensor that does not depend on how it is cut: each element's words come from
/// a counter-based generator keyed by `seed` and indexed by the element's place in the whole
/// tensor, so any mesh holds what one rank would.
struct RandomSource {
  uint64_t seed;
  const spec::Layout* layout;  ///< nullptr: a plain tensor, all of it on each rank
  std::vector<int64_t> sizes;  ///< global
};

/// A seed from the default CPU generator, or the given one: equal on all ranks because each draws
/// once. The first draw on a layout's axes compares the ranks (collective over them); ranks that
/// are threads share one generator, so there one rank draws for all (collective each time).
/// @throws c10::Error when the ranks' generators are not in one state.
uint64_t draw_seed(const std::optional<at::Generator>& generator, const spec::Layout* layout,
                   c10::Device device);

/// Uniform in [0, 1) with as many bits as `options`' dtype holds, in the piece's sizes. Local.
at::Tensor random_uniform(const RandomSource& source, const at::TensorOptions& options);
/// Standard normal. Local.
at::Tensor random_normal(const RandomSource& source, const at::TensorOptions& options);
/// Integers in [low, low + range); range 0 stands for all 2^64. Local.
at::Tensor random_integers(const RandomSource& source, int64_t low, uint64_t range,
                           const at::TensorOptions& options);
/// True with probability p; 32 bits decide. Local.
at::Tensor random_mask(const RandomSource& source, double p, c10::Device device);

}  // namespace shardfield::ops
