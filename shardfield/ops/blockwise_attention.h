#pragma once

#include <optional>

#include <ATen/core/Tensor.h>

namespace shardfield::ops {

/// Attention of some rows to one block of keys after another, with a running maximum and sum per
/// row: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al.,
/// "FlashAttention" (NeurIPS 2022). Where a block needs no mask of its own PyTorch's fused kernel
/// works it out; else scores exist for some rows at a time only. Sums are kept in float32 for
/// shorter types. Plain tensors, no autograd.

/// A block of keys as the rows see it.
struct KeyBlock {
  at::Tensor key;    ///< (..., heads, n, E); fewer heads than the query's are shared among them
  at::Tensor value;  ///< (..., heads, n, Ev)
  /// Added to the scores (floating) or false where a key is hidden (bool); last two dims (L, n) or
  /// broadcast to them. Undefined for none.
  at::Tensor mask;
  /// Causal: row r sees key k when first_key + k <= first_row + r.
  bool is_causal = false;
  int64_t first_row = 0, first_key = 0;
};

class BlockwiseAttention {
 public:
  /// @param query  (..., heads, L, E)
  BlockwiseAttention(const at::Tensor& query, int64_t value_features, double scale);

  void add(const KeyBlock& block);
  /// Zeros for rows that saw no key.
  at::Tensor output() const;
  /// log of the sum of exp(score) per row, (..., heads, L, 1); -inf for rows that saw no key.
  at::Tensor logsumexp() const;

 private:
  /// A block's own attention and logsumexp.
  void merge(const at::Tensor& part, const at::Tensor& logsumexp);

  at::Tensor query_;
  double scale_;
  at::Tensor sum_, largest_, weighted_;
};

/// In the type in which sums are kept.
struct BlockGradients {
  at::Tensor key, value;  ///< of the block's sizes
  at::Tensor mask;        ///< of the broadcast shape; undefined unless asked for
};

/// What one block adds to the gradients of an attention whose output, or the product of output and
/// gradient, and logsumexp are known. One of the two is to be set.
class BlockwiseAttentionGradient {
 public:
  /// @param grad  of the output
  BlockwiseAttentionGradient(const at::Tensor& query, at::Tensor logsumexp, const at::Tensor& grad,
                             double scale);
  void set_output(const at::Tensor& output);
  /// @param delta  sum of output * grad per row, (..., heads, L, 1)
  void set_delta(const at::Tensor& delta);

  BlockGradients add(const KeyBlock& block, bool with_mask);
  /// In the type in which sums are kept.
  at::Tensor query() const { return query_gradient_; }

 private:
  at::Tensor query_, output_, logsumexp_, grad_, delta_;
  at::ScalarType type_;
  double scale_;
  at::Tensor query_gradient_;
};

}  // namespace shardfield::ops
