// Scaled dot-product attention. Rows of the query stay where they are: what cuts the batch, the
// heads or the query's rows cuts the result, and each rank attends from its own rows with PyTorch's
// own kernel. Keys and values follow the cuts of batch and heads. Where they are cut along the axes
// that cut the query's rows, they pass by in blocks (ops/ring_attention.h), or are brought whole
// when they are small. Where only the keys are cut the attention is written out, and its softmax
// and second product run over the ranks.

#include <cmath>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/exchange/cut_ranks.h"
#include "shardfield/ops/ring_attention.h"
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

/// Keys and values of fewer bytes, over all ranks, are brought whole: one message, and PyTorch's
/// fused kernel in one call. Accelerators lose more by leaving that kernel.
int64_t bytes_brought_whole(c10::Device device) {
  return device.is_cpu() ? int64_t{1} << 20 : int64_t{256} << 20;
}

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

/// Whether each rank attends from its own rows, its part of the batch and of the heads alone.
bool is_row_wise(const Tensor& query, const Tensor& key, const Tensor& value, const Layout* result,
                 const Options& options) {
  const int64_t batch = query.dim() - 2;
  if (!result || batch < 0 || key.dim() != query.dim() || value.dim() != query.dim()) return false;
  const int64_t alike = options.enable_gqa ? std::max<int64_t>(batch - 1, 0) : batch;
  const bool same_heads = query.sizes().slice(0, alike) == key.sizes().slice(0, alike) &&
                          query.sizes().slice(0, alike) == value.sizes().slice(0, alike);
  if (options.dropout_p > 0 || !same_heads) return false;
  if (!is_sharded(key)) return true;
  // An axis that cuts only the keys would make every rank repeat the others' work.
  for (const Cut& cut : layout_of(key).cuts())
    for (int axis : cut.axes)
      if (!uses(result, axis)) return false;
  return true;
}

std::vector<int> axes_on(const Layout& layout, int dim) {
  std::vector<int> axes;
  for (const Cut& cut : layout.cuts())
    if (cut.dim == dim) axes.insert(axes.end(), cut.axes.begin(), cut.axes.end());
  std::ranges::sort(axes);
  return axes;
}

/// How keys and values are held while they pass round, or null where they do not: cut as the result
/// is, their rows along the axes that cut the query's.
const Layout* ring_layout(const Tensor& query, const Tensor& key, const Tensor& value, bool masked,
                          const Layout& result, const Options& options) {
  const auto rows = static_cast<int>(query.dim()) - 2;
  if (!is_sharded(key) || !result.is_cut(rows) || !layout_of(key).is_cut(rows)) return nullptr;
  const Layout& own = layout_of(key);
  const bool simple = result.is_simple(query.sizes().data()) && own.is_simple(key.sizes().data()) &&
                      own.cuts()[own.cut_on(rows)].axes == result.cuts()[result.cut_on(rows)].axes;
  // Without a mask no block needs to know where its keys lie.
  if (!simple && (options.is_causal || masked)) return nullptr;
  if (options.enable_gqa && (rows < 1 || result.is_cut(rows - 1))) return nullptr;
  if (axes_on(own, rows) != axes_on(result, rows)) return nullptr;
  const auto bytes = static_cast<int64_t>((key.numel() + value.numel()) * key.itemsize());
  if (bytes < bytes_brought_whole(key.device())) return nullptr;
  const Layout* batch = key_layout(result, rows);
  std::vector<Cut> cuts = batch ? batch->cuts() : std::vector<Cut>();
  for (const Cut& cut : own.cuts())
    if (cut.dim == rows) cuts.push_back(cut);
  return spec::intern_layout(result.mesh(), std::move(cuts));
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
Tensor causal_mask(at::IntArrayRef query_sizes, int64_t num_keys, const Layout& result,
                   const at::TensorOptions& options) {
  const auto rows = static_cast<int>(query_sizes.size()) - 2;
  std::vector<Cut> cuts;
  for (const Cut& cut : result.cuts())
    if (cut.dim == rows) cuts.push_back({0, cut.axes, cut.sizes});
  Tensor own = at::arange(query_sizes[rows], options.dtype(at::kLong));
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
    own_mask = causal_mask(query.sizes(), key.size(-2), result, q.options());
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

std::vector<int64_t> rows_of_ranks(const Layout& layout, int dim, at::IntArrayRef sizes,
                                   const std::vector<int>& ranks) {
  std::vector<int64_t> rows;
  for (const int r : ranks)
    rows.push_back(layout.local_sizes_at(sizes.data(), static_cast<int>(sizes.size()),
                                         layout.mesh().coord_of(r))[dim]);
  return rows;
}

/// Which rank's rows need which block of keys.
std::vector<std::vector<bool>> needed_blocks(const std::vector<int64_t>& rows,
                                             const std::vector<int64_t>& keys, bool is_causal) {
  std::vector<std::vector<bool>> needed(rows.size());
  int64_t last_row = -1;
  for (size_t r = 0; r < rows.size(); ++r) {
    last_row += rows[r];
    int64_t first_key = 0;
    for (const int64_t count : keys) {
      const bool is_seen = !is_causal || first_key <= last_row;
      needed[r].push_back(rows[r] > 0 && count > 0 && is_seen);
      first_key += count;
    }
  }
  return needed;
}

void check_operands(const Tensor& query, const Tensor& key, const Tensor& value,
                    const OptTensor& mask, const Options& options) {
  const char* op = "scaled_dot_product_attention";
  const int rank = layout_of(is_sharded(query) ? query : key).mesh().rank;
  const auto dtype = query.scalar_type();
  SHARDFIELD_CHECK(key.size(-1) == query.size(-1) && value.size(-2) == key.size(-2), op,
                   "expected query (..., L, E), key (..., S, E), value (..., S, Ev), got ",
                   query.sizes(), ", ", key.sizes(), ", ", value.sizes(), " on rank ", rank);
  SHARDFIELD_CHECK(key.scalar_type() == dtype && value.scalar_type() == dtype, op,
                   "expected query, key and value of one dtype, got ", dtype, ", ",
                   key.scalar_type(), ", ", value.scalar_type(), " on rank ", rank);
  if (options.enable_gqa && query.dim() > 2) {
    const int64_t heads = query.size(-3), of_key = key.size(-3), of_value = value.size(-3);
    SHARDFIELD_CHECK(of_key > 0 && of_value > 0 && heads % of_key == 0 && heads % of_value == 0, op,
                     "expected heads of query that those of key and value divide, got ", heads,
                     ", ", of_key, ", ", of_value, " on rank ", rank);
  }
  if (!mask || !mask->defined()) return;
  SHARDFIELD_CHECK(!options.is_causal, op, "expected attn_mask or is_causal, got both on rank ",
                   rank, "; put the causal part into the mask");
  std::vector<int64_t> scores = query.sizes().vec();
  scores.back() = key.size(-2);
  bool fits = mask->dim() >= 2 && mask->dim() <= query.dim();
  for (int64_t d = 1; fits && d <= mask->dim(); ++d)
    fits = mask->size(-d) == 1 || mask->size(-d) == scores[scores.size() - d];
  SHARDFIELD_CHECK(fits, op, "expected attn_mask that broadcasts to ", at::IntArrayRef(scores),
                   ", got ", mask->sizes(), " on rank ", rank);
  const auto of_mask = mask->scalar_type();
  SHARDFIELD_CHECK(of_mask == at::kBool || of_mask == at::kFloat || of_mask == dtype, op,
                   "expected attn_mask of dtype bool, float or ", dtype, ", got ", of_mask,
                   " on rank ", rank);
}

/// This rank's part of the mask: own rows x all keys.
OptTensor rows_of_mask(const OptTensor& mask, std::vector<int64_t> sizes, int64_t num_keys,
                       const Layout& result) {
  if (!mask || !mask->defined()) return std::nullopt;
  sizes.back() = num_keys;
  std::vector<int64_t> wide(mask->dim(), -1);
  std::copy(sizes.end() - 2, sizes.end(), wide.end() - 2);
  return tensor::piece_for(mask->expand(wide), result, sizes);
}

std::vector<std::vector<bool>> transposed(const std::vector<std::vector<bool>>& table) {
  std::vector<std::vector<bool>> result(table.size(), std::vector<bool>(table.size()));
  for (size_t i = 0; i < table.size(); ++i)
    for (size_t j = 0; j < table.size(); ++j) result[j][i] = table[i][j];
  return result;
}

Tensor attend_with_ring(const Tensor& query, const Tensor& key, const Tensor& value,
                        const OptTensor& mask, const Layout& result, const Layout& of_keys,
                        const Options& options) {
  const auto rows = static_cast<int>(query.dim()) - 2;
  // In the order of the rows where a simple cut gives them one.
  const std::vector<int> ranks =
      result.is_simple(query.sizes().data())
          ? exchange::ranks_along(result, static_cast<size_t>(result.cut_on(rows)))
          : exchange::ranks_over(result.mesh(), axes_on(result, rows));
  const std::vector<int64_t> row_counts = rows_of_ranks(result, rows, query.sizes(), ranks);
  const std::vector<int64_t> key_counts = rows_of_ranks(of_keys, rows, key.sizes(), ranks);
  std::vector<int64_t> sizes = query.sizes().vec();
  const auto gathered = [&result, &of_keys, options, query_sizes = sizes,
                         key_sizes = key.sizes().vec(), value_sizes = value.sizes().vec()](
                            const Tensor& q, const Tensor& k, const Tensor& v, OptTensor own_mask) {
    const Layout* whole = key_layout(result, static_cast<int>(query_sizes.size()) - 2);
    Options own = options;
    own.is_causal = false;
    if (options.is_causal)
      own_mask = causal_mask(query_sizes, key_sizes[key_sizes.size() - 2], result, q.options());
    return written_out(q, operand(tensor::wrap(k, &of_keys, key_sizes), whole, result),
                       operand(tensor::wrap(v, &of_keys, value_sizes), whole, result), own_mask,
                       own);
  };
  const double scale = options.scale.value_or(
      1 / std::sqrt(std::max<double>(static_cast<double>(query.size(-1)), 1)));
  const auto needed = needed_blocks(row_counts, key_counts, options.is_causal);
  const RingAttention ring{exchange::BlockRing(result.mesh(), ranks, needed),
                           exchange::BlockRing(result.mesh(), ranks, transposed(needed),
                                               exchange::BlockRing::Direction::kDown),
                           key_counts,
                           row_counts,
                           options.is_causal,
                           scale,
                           gathered};
  const Tensor piece = attend_in_ring(
      tensor::piece_for(query, result, sizes), tensor::local(tensor::redistribute(key, &of_keys)),
      tensor::local(tensor::redistribute(value, &of_keys)),
      rows_of_mask(mask, sizes, key.size(-2), result), std::make_shared<const RingAttention>(ring));
  sizes.back() = value.size(-1);
  return tensor::wrap(piece, &result, sizes);
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const OptTensor& mask,
                 double dropout_p, bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const Options options{dropout_p, is_causal, scale, enable_gqa};
  if (is_sharded(query) || is_sharded(key)) {
    const Layout* result = result_layout(query, key);
    if (is_row_wise(query, key, value, result, options)) {
      check_operands(query, key, value, mask, options);
      const bool masked = mask && mask->defined();
      if (const Layout* of_keys = ring_layout(query, key, value, masked, *result, options))
        return attend_with_ring(query, key, value, mask, *result, *of_keys, options);
      if (!options.enable_gqa) return attend_row_wise(query, key, value, mask, *result, options);
    }
  }
  return written_out(query, key, value, mask, options);
}

}  // namespace

SHARDFIELD_OPS(attention) {
  table.composed("aten::scaled_dot_product_attention", TORCH_FN(attention));
}

}  // namespace shardfield::ops
