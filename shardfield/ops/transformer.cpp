// The fused inference kernels behind nn.MultiheadAttention and nn.TransformerEncoderLayer, written
// out in the ops they fuse, so that a cut batch stays local and cut tokens stay where they are.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using OptTensor = std::optional<Tensor>;

/// A boolean mask, true where a key is not seen, in the shape of the scores (batch, heads, L, S).
Tensor mask_of_scores(const Tensor& mask, std::optional<int64_t> kind) {
  SHARDFIELD_CHECK(kind && *kind >= 0 && *kind <= 2, "_native_multi_head_attention",
                   "expected mask_type 0 (rows and keys), 1 (keys of each sample) or 2 (scores)");
  Tensor seen = mask.scalar_type() == at::kBool ? mask : mask.to(at::kBool);
  if (*kind == 1) return seen.unsqueeze(1).unsqueeze(1);
  return seen;
}

/// (batch, tokens, features) to (batch, heads, tokens, features of one head).
Tensor heads_of(const Tensor& x, int64_t num_heads) {
  return x.reshape({x.size(0), x.size(1), num_heads, x.size(2) / num_heads}).transpose(1, 2);
}

std::vector<Tensor> projections(const Tensor& query, const Tensor& key, const Tensor& value,
                                const Tensor& weight, const Tensor& bias) {
  if (query.is_same(key) && key.is_same(value)) return at::linear(query, weight, bias).chunk(3, -1);
  const auto weights = weight.chunk(3, 0);
  const auto biases = bias.defined() ? bias.chunk(3, 0) : std::vector<Tensor>(3);
  return {at::linear(query, weights[0], biases[0]), at::linear(key, weights[1], biases[1]),
          at::linear(value, weights[2], biases[2])};
}

std::tuple<Tensor, Tensor> multi_head_attention(const Tensor& query, const Tensor& key,
                                                const Tensor& value, int64_t embed_dim,
                                                int64_t num_heads, const Tensor& qkv_weight,
                                                const Tensor& qkv_bias, const Tensor& proj_weight,
                                                const Tensor& proj_bias, const OptTensor& mask,
                                                bool need_weights, bool average_weights,
                                                std::optional<int64_t> mask_type) {
  SHARDFIELD_CHECK(query.dim() == 3 && query.size(2) == embed_dim && embed_dim % num_heads == 0,
                   "_native_multi_head_attention", "expected a query (batch, tokens, ", embed_dim,
                   ") and heads that divide it, got ", query.sizes(), " and ", num_heads, " heads");
  const auto qkv = projections(query, key, value, qkv_weight, qkv_bias);
  const Tensor q = heads_of(qkv[0], num_heads), k = heads_of(qkv[1], num_heads),
               v = heads_of(qkv[2], num_heads);
  Tensor out, weights;
  if (need_weights || mask) {
    Tensor scores = at::matmul(q / std::sqrt(static_cast<double>(q.size(-1))), k.transpose(-2, -1));
    if (mask)
      scores = scores.masked_fill(mask_of_scores(*mask, mask_type),
                                  -std::numeric_limits<double>::infinity());
    weights = at::softmax(scores, -1);
    out = at::matmul(weights, v);
  } else {
    out = at::scaled_dot_product_attention(q, k, v);
  }
  out = at::linear(out.transpose(1, 2).reshape(query.sizes()), proj_weight, proj_bias);
  if (!need_weights) return {out, Tensor()};
  return {out, average_weights ? weights.mean(1) : weights};
}

Tensor encoder_layer(const Tensor& src, int64_t embed_dim, int64_t num_heads,
                     const Tensor& qkv_weight, const Tensor& qkv_bias, const Tensor& proj_weight,
                     const Tensor& proj_bias, bool use_gelu, bool norm_first, double eps,
                     const Tensor& norm_weight_1, const Tensor& norm_bias_1,
                     const Tensor& norm_weight_2, const Tensor& norm_bias_2,
                     const Tensor& ffn_weight_1, const Tensor& ffn_bias_1,
                     const Tensor& ffn_weight_2, const Tensor& ffn_bias_2, const OptTensor& mask,
                     std::optional<int64_t> mask_type) {
  const auto first_norm = [&](const Tensor& t) {
    return at::layer_norm(t, {embed_dim}, norm_weight_1, norm_bias_1, eps);
  };
  const auto second_norm = [&](const Tensor& t) {
    return at::layer_norm(t, {embed_dim}, norm_weight_2, norm_bias_2, eps);
  };
  const auto attend = [&](const Tensor& t) {
    return std::get<0>(multi_head_attention(t, t, t, embed_dim, num_heads, qkv_weight, qkv_bias,
                                            proj_weight, proj_bias, mask, false, true, mask_type));
  };
  const auto feed_forward = [&](const Tensor& t) {
    const Tensor hidden = at::linear(t, ffn_weight_1, ffn_bias_1);
    return at::linear(use_gelu ? at::gelu(hidden) : at::relu(hidden), ffn_weight_2, ffn_bias_2);
  };
  if (norm_first) {
    const Tensor x = src + attend(first_norm(src));
    return x + feed_forward(second_norm(x));
  }
  const Tensor x = first_norm(src + attend(src));
  return second_norm(x + feed_forward(x));
}

[[noreturn]] void refuse_nested(const Tensor& x) {
  SHARDFIELD_CHECK(false, "TransformerEncoder", "a padded batch becomes a nested tensor, which ",
                   "cannot be sharded: got ", tensor::describe(x), " on rank ",
                   tensor::layout_of(x).mesh().rank,
                   "; build the encoder with enable_nested_tensor=False");
}

bool is_left_aligned(const Tensor& x, const Tensor& mask) {
  refuse_nested(tensor::is_sharded(x) ? x : mask);
}
Tensor nested_from_mask(const Tensor& x, const Tensor& mask, bool check) {
  (void)check;
  refuse_nested(tensor::is_sharded(x) ? x : mask);
}

}  // namespace

SHARDFIELD_OPS(transformer) {
  table.composed("aten::_native_multi_head_attention", TORCH_FN(multi_head_attention));
  table.composed("aten::_transformer_encoder_layer_fwd", TORCH_FN(encoder_layer));
  table.composed("aten::_nested_tensor_from_mask_left_aligned", TORCH_FN(is_left_aligned));
  table.composed("aten::_nested_tensor_from_mask", TORCH_FN(nested_from_mask));
}

}  // namespace shardfield::ops
