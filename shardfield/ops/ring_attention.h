#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/exchange/block_ring.h"

namespace shardfield::ops {

/// Attention whose keys and values stay cut: blocks of them pass by every rank that needs them, so
/// that no rank holds more than its own and two in passing. In backward they do so again, or the
/// queries do, whichever is less.
struct RingAttention {
  exchange::BlockRing keys, queries;
  std::vector<int64_t> key_counts, row_counts;  ///< of each rank, in the order of the ring
  bool is_causal;                               ///< then in the order of the rows
  double scale;
  /// The same function with all keys on every rank, differentiable any number of times.
  std::function<at::Tensor(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                           const std::optional<at::Tensor>& mask)>
      gathered;
};

/// @param query  this rank's rows, (..., heads, L, E)
/// @param key    this rank's keys, (..., heads, n, E); fewer heads are shared among the query's
/// @param mask   bool, or added to the scores: own rows x all keys, or what broadcasts to it
/// @return (..., heads, L, Ev). Differentiable; second derivatives gather the keys. Collective.
at::Tensor attend_in_ring(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                          const std::optional<at::Tensor>& mask,
                          std::shared_ptr<const RingAttention> ring);

}  // namespace shardfield::ops
