// Scaled dot-product attention. Rows of the query stay where they are: what cuts the batch, the
// heads or the query's rows cuts the result, and each rank attends from its own rows with PyTorch's
// own kernel. Keys and values follow the cuts of batch and heads and are brought whole along the
// axes that cut the query's rows. Where only the keys are cut the attention is written out, and its
// softmax and second product run over the ranks.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/redistribute.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using OptTensor = std::optional<Tensor>;

struct Options {
  double dropout_p;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;
};

bool uses(const Layout* layout, int axis) {
  return layout && std::binary_search(layout->axes().begin(), layout->axes().end(), axis);
}

/// The cuts of query (..., L, E) on its batch dims, heads and rows; then those of key on batch dims
/// and heads that are still free. nullptr when none is left.
const Layout* result_layout(const Tensor& query, const Tensor& key) {
  const int rows = static_cast<int>(query.dim()) - 2;
  const spec::Mesh& mesh = layout_of(is_sharded(query) ? query : key).mesh();
  std::vector<Cut> cuts;
  if (is_sharded(query))
    for (const Cut& cut : layout_of(query).cuts())
      if (cut.dim <= rows) cuts.push_back(cut);
  const Layout* from_query = spec::intern_layout(mesh, cuts);
  if (is_sharded(key)) {
    for (const Cut& cut : layout_of(key).cuts()) {
      const bool taken = std::any_of(cut.axes.begin(), cut.axes.end(),
                                     [&](int axis) { return uses(from_query, axis); });
      if (cut.dim < rows && !taken && !(from_query && from_query->is_cut(cut.dim)))
        cuts.push_back(cut);
    }
  }
  std::stable_sort(cuts.begin(), cuts.end(),
                   [](const Cut& a, const Cut& b) { return a.dim < b.dim; });
  return spec::intern_layout(mesh, std::move(cuts));
}

/// The same on batch dims and heads alone: how keys and values are held.
const Layout* key_layout(const Layout& result, int rows) {
  std::vector<Cut> cuts;
  for (const Cut& cut : result.cuts())
    if (cut.dim < rows) cuts.push_back(cut);
  return spec::intern_layout(result.mesh(), std::move(cuts));
}

bool is_row_wise(const Tensor& query, const Tensor& key, const Tensor& value, const Layout* result,
                 const Options& options) {
  const int64_t batch = query.dim() - 2;
  if (!result || batch < 0 || key.dim() != query.dim() || value.dim() != query.dim()) return false;
  const bool same_heads = query.sizes().slice(0, batch) == key.sizes().slice(0, batch) &&
                          query.sizes().slice(0, batch) == value.sizes().slice(0, batch);
  if (options.dropout_p > 0 || options.enable_gqa || !same_heads) return false;
  if (!is_sharded(key)) return true;
  // An axis that cuts only the keys would make every rank repeat the others' work.
  for (const Cut& cut : layout_of(key).cuts())
    for (int axis : cut.axes)
      if (!uses(result, axis)) return false;
  return true;
}

/// Keys or values on this rank; the gradient sums over the axes along which they are whole.
Tensor operand(const Tensor& t, const Layout* own, const Layout& result) {
  std::vector<int> whole_axes;
  for (int axis : result.axes())
    if (!uses(own, axis)) whole_axes.push_back(axis);
  const Tensor moved = tensor::redistribute(t, own);
  return tensor::enter(own ? tensor::local(moved) : moved, result.mesh(), whole_axes);
}

/// Which keys each of this rank's rows sees under the causal mask, (own rows, keys).
Tensor causal_mask(const Tensor& query, int64_t num_keys, const Layout& result) {
  const auto rows = static_cast<int>(query.dim()) - 2;
  std::vector<Cut> cuts;
  for (const Cut& cut : result.cuts())
    if (cut.dim == rows) cuts.push_back({0, cut.axes, cut.sizes});
  const auto options =
      tensor::is_sharded(query) ? tensor::piece_of(query).options() : query.options();
  Tensor own = at::arange(query.size(rows), options.dtype(at::kLong));
  if (const Layout* of_rows = spec::intern_layout(result.mesh(), std::move(cuts)))
    own = tensor::slice_piece(own, *of_rows).reshape({-1});
  return at::arange(num_keys, own.options()).unsqueeze(0) <= own.unsqueeze(1);
}

/// The attention written out, as PyTorch does where it has no fused kernel.
Tensor written_out(const Tensor& query, const Tensor& key, const Tensor& value, OptTensor mask,
                   const Options& options) {
  if (mask && mask->scalar_type() == at::kBool)
    mask = at::zeros_like(*mask, query.scalar_type())
               .masked_fill(mask->logical_not(), -std::numeric_limits<double>::infinity());
  return std::get<0>(at::_scaled_dot_product_attention_math(
      query, key, value, mask, options.dropout_p, options.is_causal, std::nullopt, options.scale,
      options.enable_gqa));
}

Tensor attend_row_wise(const Tensor& query, const Tensor& key, const Tensor& value,
                       const OptTensor& mask, const Layout& result, const Options& options) {
  const auto rows = static_cast<int>(query.dim()) - 2;
  const Layout* of_keys = key_layout(result, rows);
  std::vector<int64_t> sizes = query.sizes().vec();
  const Tensor q = tensor::piece_for(query, result, sizes);
  const Tensor k = operand(key, of_keys, result), v = operand(value, of_keys, result);
  sizes.back() = key.size(-2);
  OptTensor own_mask;
  if (mask && mask->defined()) own_mask = tensor::piece_for(*mask, result, sizes);
  Options own = options;
  if (own.is_causal && result.is_cut(rows)) {
    SHARDFIELD_CHECK(!own_mask, "scaled_dot_product_attention",
                     "expected either attn_mask or is_causal, got both");
    own_mask = causal_mask(query, key.size(-2), result);
    own.is_causal = false;
  }
  // Ranks without rows or keys still take part in what backward exchanges.
  const bool empty = q.numel() == 0 || k.numel() == 0;
  const Tensor piece =
      empty ? written_out(q, k, v, own_mask, own)
            : at::scaled_dot_product_attention(q, k, v, own_mask, 0.0, own.is_causal, own.scale);
  sizes.back() = value.size(-1);
  return tensor::wrap(piece, &result, sizes);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& mask,
                 double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const Options options{dropout_p, is_causal, scale, enable_gqa};
  if (is_sharded(query) || is_sharded(key)) {
    const Layout* result = result_layout(query, key);
    if (is_row_wise(query, key, value, result, options))
      return attend_row_wise(query, key, value, mask, *result, options);
  }
  return written_out(query, key, value, mask, options);
}

}  // namespace

SHARDFIELD_OPS(attention) {
  table.composed("aten::scaled_dot_product_attention", TORCH_FN(attention));
}

}  // namespace shardfield::ops
