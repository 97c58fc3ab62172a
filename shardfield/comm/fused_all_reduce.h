#pragma once

#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/spec/mesh.h"

namespace shardfield::comm {

inline constexpr int64_t kBucketBytes = int64_t{25} << 20;

/// Reduces many tensors over a group in few messages: tensors of one dtype share buffers of up to
/// `bucket_bytes`, and a buffer travels while the next is packed. Results are fresh tensors.
///
/// Per-rank values as in vector_collectives.h: the gradient of a sum is the sum of the ranks'
/// gradients; that of a minimum or maximum goes to the ranks that hold it, ties share; products are
/// not differentiable. Any order of derivative. Collective over the group.
///
/// @param average       kSum only: divide by the group's size (integers: rejected)
/// @param buffer_dtype  dtype of the messages of floating-point tensors; default: their own, float
///                      for 16-bit ones
/// @throws c10::Error when the ranks pass other shapes or dtypes, on every rank.
std::vector<at::Tensor> fused_all_reduce(const std::vector<at::Tensor>& tensors,
                                         const spec::Mesh& group,
                                         Reduction reduction = Reduction::kSum,
                                         bool average = false,
                                         std::optional<at::ScalarType> buffer_dtype = std::nullopt,
                                         int64_t bucket_bytes = kBucketBytes);

}  // namespace shardfield::comm
