#include "shardfield/ops/blockwise_attention.h"

#include <limits>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/OpMathType.h>

namespace shardfield::ops {

namespace {

using at::Tensor;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr int64_t kScoreBytes = int64_t{32} << 20;

/// One copy of each head per query head that shares it.
Tensor shared_heads(const Tensor& t, const Tensor& query) {
  if (t.dim() < 3 || t.size(-3) == query.size(-3)) return t;
  return t.repeat_interleave(query.size(-3) / t.size(-3), -3);
}
Tensor summed_heads(const Tensor& grad, const Tensor& like) {
  if (grad.dim() < 3 || grad.size(-3) == like.size(-3)) return grad;
  const int64_t heads = like.size(-3);
  return grad.unflatten(-3, {heads, grad.size(-3) / heads}).sum(-3);
}

/// Rows of the query that are worked on at a time.
int64_t rows_at_a_time(const Tensor& query, const Tensor& key) {
  const int64_t others = c10::multiply_integers(query.sizes().slice(0, query.dim() - 2));
  const int64_t bytes = std::max<int64_t>(others * key.size(-2), 1) * 8;
  return std::clamp<int64_t>(kScoreBytes / bytes, 1, std::max<int64_t>(query.size(-2), 1));
}

/// Scores of `count` rows from `begin` on.
Tensor scores_of(const Tensor& query, const Tensor& key, const KeyBlock& block, double scale,
                 int64_t begin, int64_t count) {
  Tensor scores = at::matmul(query.narrow(-2, begin, count), key.transpose(-2, -1)).mul_(scale);
  if (block.mask.defined()) {
    const Tensor mask = block.mask.size(-2) == 1 ? block.mask : block.mask.narrow(-2, begin, count);
    if (mask.scalar_type() == at::kBool)
      scores.masked_fill_(mask.logical_not(), -kInfinity);
    else
      scores.add_(mask);
  }
  const int64_t first_row = block.first_row + begin, keys = key.size(-2);
  if (block.is_causal && block.first_key + keys - 1 > first_row) {
    const auto options = scores.options().dtype(at::kLong);
    const Tensor row = at::arange(first_row, first_row + count, options).unsqueeze(1);
    scores.masked_fill_(at::arange(block.first_key, block.first_key + keys, options) > row,
                        -kInfinity);
  }
  return scores;
}

enum class Fused { kNo, kAllKeys, kCausal };

/// Whether PyTorch's fused kernel serves, which tells the logsumexp too. It reads operands as
/// contiguous in their last dim.
Fused fused_form(const Tensor& query, const KeyBlock& block, double scale) {
  const bool fits = query.device().is_cpu() && query.dim() == 4 && !block.mask.defined() &&
                    query.size(-1) == block.value.size(-1) &&
                    query.size(-3) == block.key.size(-3) &&
                    query.size(-3) == block.value.size(-3) && query.numel() > 0;
  if (!fits) return Fused::kNo;
  const int64_t rows = query.size(-2), keys = block.key.size(-2);
  if (!block.is_causal || block.first_key + keys - 1 <= block.first_row) return Fused::kAllKeys;
  // It hides keys before it scales.
  const bool aligned = block.first_key == block.first_row && keys == rows && scale > 0;
  return aligned ? Fused::kCausal : Fused::kNo;
}

/// The block without keys that lie behind every row.
KeyBlock seen_part(const KeyBlock& block, int64_t rows) {
  const int64_t keys = block.key.size(-2);
  const int64_t seen = std::clamp<int64_t>(block.first_row + rows - block.first_key, 0, keys);
  if (!block.is_causal || seen == keys) return block;
  KeyBlock part = block;
  part.key = block.key.narrow(-2, 0, seen);
  part.value = block.value.narrow(-2, 0, seen);
  return part;
}

/// With `length` rows of keys, those added zeros.
Tensor grown(const Tensor& grad, int64_t length) {
  if (grad.size(-2) == length) return grad;
  return at::constant_pad_nd(grad, {0, 0, 0, length - grad.size(-2)});
}

/// In place of an exponent of -inf, where every score is -inf too.
Tensor finite(const Tensor& t) {
  return t.masked_fill(t == -kInfinity, 0);
}

}  // namespace

BlockwiseAttention::BlockwiseAttention(const Tensor& query, int64_t value_features, double scale)
    : query_(query.contiguous()), scale_(scale) {
  const auto options = query.options().dtype(at::toOpMathType(query.scalar_type()));
  std::vector<int64_t> sizes = query.sizes().vec();
  sizes.back() = value_features;
  weighted_ = at::zeros(sizes, options);
  sizes.back() = 1;
  sum_ = at::zeros(sizes, options);
  largest_ = at::full(sizes, -kInfinity, options);
}

void BlockwiseAttention::merge(const Tensor& part, const Tensor& logsumexp) {
  const Tensor now = at::maximum(largest_, logsumexp), shift = finite(now);
  const Tensor kept = (largest_ - shift).exp_(), weight = (logsumexp - shift).exp_();
  sum_.mul_(kept).add_(weight);
  weighted_.mul_(kept).addcmul_(part.to(weighted_.scalar_type()), weight);
  largest_ = now;
}

void BlockwiseAttention::add(const KeyBlock& given) {
  const KeyBlock block = seen_part(given, query_.size(-2));
  if (block.key.size(-2) == 0 || sum_.numel() == 0) return;
  if (const Fused fused = fused_form(query_, block, scale_); fused != Fused::kNo) {
    const auto [part, logsumexp] = at::_scaled_dot_product_flash_attention_for_cpu(
        query_, block.key.contiguous(), block.value.contiguous(), 0.0, fused == Fused::kCausal,
        std::nullopt, scale_);
    return merge(part, logsumexp.unsqueeze(-1));
  }
  const auto type = sum_.scalar_type();
  const Tensor query = query_.to(type), key = shared_heads(block.key, query_).to(type);
  const Tensor value = shared_heads(block.value, query_).to(type);
  const int64_t rows = query.size(-2), step = rows_at_a_time(query, key);
  for (int64_t begin = 0; begin < rows; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    Tensor weights = scores_of(query, key, block, scale_, begin, count);
    Tensor largest = largest_.narrow(-2, begin, count), sum = sum_.narrow(-2, begin, count);
    Tensor weighted = weighted_.narrow(-2, begin, count);
    const Tensor now = at::maximum(largest, weights.amax(-1, true));
    const Tensor shift = finite(now);
    weights.sub_(shift).exp_();
    const Tensor kept = (largest - shift).exp_();
    sum.mul_(kept).add_(weights.sum(-1, true));
    weighted.mul_(kept).add_(at::matmul(weights, value));
    largest.copy_(now);
  }
}

Tensor BlockwiseAttention::output() const {
  return (weighted_ / sum_.masked_fill(sum_ == 0, 1)).to(query_.scalar_type());
}

Tensor BlockwiseAttention::logsumexp() const {
  return largest_ + sum_.log();
}

BlockwiseAttentionGradient::BlockwiseAttentionGradient(const Tensor& query, Tensor logsumexp,
                                                       const Tensor& grad, double scale)
    : query_(query.contiguous()),
      logsumexp_(std::move(logsumexp)),
      grad_(grad.to(at::toOpMathType(query.scalar_type())).contiguous()),
      type_(at::toOpMathType(query.scalar_type())),
      scale_(scale),
      query_gradient_(at::zeros_like(query, type_)) {}

void BlockwiseAttentionGradient::set_output(const Tensor& output) {
  output_ = output;
  delta_ = (grad_ * output).sum(-1, true);
}

void BlockwiseAttentionGradient::set_delta(const Tensor& delta) {
  delta_ = delta;
  // The fused kernel asks for the output, of which only the part along the gradient counts.
  if (grad_.numel() == 0) {
    output_ = grad_;
    return;
  }
  const Tensor largest = grad_.abs().amax(-1, true);  // squares of small gradients would vanish
  const Tensor unit = largest.masked_fill(largest == 0, 1), scaled = grad_ / unit;
  const Tensor squares = scaled.square().sum(-1, true);
  output_ =
      (scaled * (delta / unit / squares.masked_fill(squares == 0, 1))).to(query_.scalar_type());
}

BlockGradients BlockwiseAttentionGradient::add(const KeyBlock& given, bool with_mask) {
  const KeyBlock block = seen_part(given, query_.size(-2));
  const int64_t keys = given.key.size(-2);
  const Fused fused = block.key.size(-2) > 0 ? fused_form(query_, block, scale_) : Fused::kNo;
  if (fused != Fused::kNo) {
    const auto [of_query, of_key, of_value] =
        at::_scaled_dot_product_flash_attention_for_cpu_backward(
            grad_.to(query_.scalar_type()), query_, block.key.contiguous(),
            block.value.contiguous(), output_, logsumexp_.squeeze(-1), 0.0, fused == Fused::kCausal,
            std::nullopt, scale_);
    query_gradient_.add_(of_query);
    return {grown(of_key.to(type_), keys), grown(of_value.to(type_), keys), {}};
  }
  // Rows that saw no key: exp(-inf - inf) is 0.
  const Tensor logsumexp = logsumexp_.masked_fill(logsumexp_ == -kInfinity, kInfinity);
  const Tensor query = query_.to(type_), key = shared_heads(block.key, query).to(type_);
  const Tensor value = shared_heads(block.value, query).to(type_);
  Tensor key_gradient = at::zeros_like(key), value_gradient = at::zeros_like(value), mask_gradient;
  const int64_t rows = query.size(-2), step = rows_at_a_time(query, key);
  if (with_mask) mask_gradient = at::zeros(block.mask.sizes(), query.options());
  for (int64_t begin = 0; begin < rows && delta_.numel() > 0; begin += step) {
    const int64_t count = std::min(step, rows - begin);
    const Tensor grad = grad_.narrow(-2, begin, count), q = query.narrow(-2, begin, count);
    const Tensor weights = scores_of(query, key, block, scale_, begin, count)
                               .sub_(logsumexp.narrow(-2, begin, count))
                               .exp_();
    value_gradient.add_(at::matmul(weights.transpose(-2, -1), grad));
    const Tensor scores = at::matmul(grad, value.transpose(-2, -1))
                              .sub_(delta_.narrow(-2, begin, count))
                              .mul_(weights);
    query_gradient_.narrow(-2, begin, count).add_(at::matmul(scores, key), scale_);
    key_gradient.add_(at::matmul(scores.transpose(-2, -1), q), scale_);
    if (with_mask) {
      Tensor part =
          mask_gradient.size(-2) == 1 ? mask_gradient : mask_gradient.narrow(-2, begin, count);
      part.add_(at::sum_to(scores, part.sizes()));
    }
  }
  return {grown(summed_heads(key_gradient, block.key), keys),
          grown(summed_heads(value_gradient, block.value), keys), mask_gradient};
}

}  // namespace shardfield::ops
