#pragma once

#include <ATen/core/Tensor.h>

#include "shardfield/base/torch_version.h"

namespace shardfield::dispatch {

/// The accumulator of a sharded leaf that moves arriving gradients (plain ones from pass-through
/// formulas, ones cut otherwise) to the leaf's own layout. Hooks stay as they are: PyTorch's C++
/// and Python hooks on one tensor delete each other, so no hook is used.
/// @return the node to keep alive until the graph holds it; null when t is not such a leaf.
NodePointer prepare_leaf(const at::Tensor& t);

}  // namespace shardfield::dispatch
