// Counting: histc, histogram, bincount. Every rank counts its own elements in the same bins; the
// counts are summed.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Scalar;
using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using tensor::piece_of;
using MaybeTensor = std::optional<Tensor>;
using Pair = std::tuple<Tensor, Tensor>;

/// Both ends of the bins, given or from the data; as one device widens a range of no length.
std::pair<double, double> bin_range(const Tensor& x, double low, double high) {
  if (low == high && x.numel() > 0) {
    low = x.min().item().toDouble();
    high = x.max().item().toDouble();
  }
  if (low == high) return {low - 0.5, high + 0.5};
  return {low, high};
}

/// The counts of x's ranks, summed. `count` is not called where a rank holds nothing.
template <class F>
Tensor summed_counts(const Tensor& x, const Tensor& nothing, F&& count) {
  const Tensor own = piece_of(x).numel() > 0 ? count() : nothing;
  return comm::all_reduce(own, layout_of(x).mesh(), layout_of(x).axes());
}

Tensor histc(const Tensor& x, int64_t bins, const Scalar& min, const Scalar& max) {
  const at::NoGradGuard no_grad;
  SHARDFIELD_CHECK(bins > 0, "histc", "bins must be > 0, got ", bins);
  const auto [low, high] = bin_range(x, min.toDouble(), max.toDouble());
  SHARDFIELD_CHECK(std::isfinite(low) && std::isfinite(high), "histc", "range of [", low, ", ",
                   high, "] is not finite");
  SHARDFIELD_CHECK(low < high, "histc", "max must be larger than min, got ", low, " and ", high);
  return summed_counts(x, at::zeros({bins}, piece_of(x).options()),
                       [&, l = low, h = high] { return at::histc(piece_of(x), bins, l, h); });
}

Tensor bincount(const Tensor& values, const MaybeTensor& weights, c10::SymInt sym_least) {
  const at::NoGradGuard no_grad;
  const int64_t least = sym_least.expect_int();
  const bool weighted = weights.has_value() && weights->defined();
  SHARDFIELD_CHECK(values.dim() == 1 && at::isIntegralType(values.scalar_type(), false), "bincount",
                   "only supports 1-d non-negative integral inputs, got ",
                   tensor::describe(values));
  SHARDFIELD_CHECK(least >= 0, "bincount", "minlength should be >= 0, got ", least);
  SHARDFIELD_CHECK(!weighted || weights->sizes() == values.sizes(), "bincount",
                   "weights should be 1-d and have the same length as input, got ",
                   weighted ? weights->sizes() : at::IntArrayRef(), " and ", values.sizes());
  const Tensor x = is_sharded(values) ? values : tensor::scatter_like(values, &layout_of(*weights));
  int64_t bins = least;
  if (x.numel() > 0) {
    SHARDFIELD_CHECK(x.min().item<int64_t>() >= 0, "bincount",
                     "only supports 1-d non-negative integral inputs, got a negative element");
    bins = std::max(bins, x.max().item<int64_t>() + 1);
  }
  const MaybeTensor own_weights =
      weighted ? MaybeTensor(tensor::piece_for(*weights, layout_of(x), x.sizes())) : std::nullopt;
  const auto count = [&](const Tensor& piece, const MaybeTensor& w) {
    return at::bincount(piece, w, bins);
  };
  // PyTorch forgets the weights' type where there is nothing to count.
  const bool sums_weights = weighted && x.numel() > 0;
  const auto type = !sums_weights                          ? at::kLong
                    : weights->scalar_type() == at::kFloat ? at::kFloat
                                                           : at::kDouble;
  const Tensor nothing = at::zeros({bins}, piece_of(x).options().dtype(type));
  return summed_counts(x, nothing, [&] { return count(piece_of(x), own_weights); });
}

/// What histogram and histogramdd share: every rank counts by `count(piece, weight)`, densities
/// divide by the sum over all and the bins' volume.
template <class F>
Tensor counted(const Tensor& x, at::IntArrayRef weight_sizes, const MaybeTensor& weight,
               const Tensor& nothing, F&& count) {
  MaybeTensor own;
  if (weight.has_value() && weight->defined()) {
    SHARDFIELD_CHECK(weight->sizes() == weight_sizes, "histogram", "expected weights of sizes ",
                     weight_sizes, ", got ", weight->sizes());
    const Layout& layout = layout_of(x);
    std::vector<int> dims(x.dim(), -1);
    for (size_t d = 0; d < weight_sizes.size(); ++d) dims[d] = static_cast<int>(d);
    const Layout* of_weight = spec::renumber(layout, dims);
    own = of_weight ? tensor::piece_for(*weight, *of_weight, weight_sizes) : *weight;
  }
  return summed_counts(x, nothing, [&] { return count(piece_of(x), own); });
}

Pair histogram_by_count(const Tensor& x, int64_t bins, std::optional<at::ArrayRef<double>> range,
                        const MaybeTensor& weight, bool density) {
  const at::NoGradGuard no_grad;
  SHARDFIELD_CHECK(bins > 0, "histogram", "bins must be > 0, got ", bins);
  SHARDFIELD_CHECK(!range || range->size() == 2, "histogram", "range should have 2 elements, got ",
                   range ? range->size() : 0);
  std::pair<double, double> ends =
      range ? std::pair((*range)[0], (*range)[1]) : bin_range(x, 0, x.numel() > 0 ? 0 : 1);
  if (ends.first == ends.second) ends = {ends.first - 0.5, ends.second + 0.5};
  const std::array<double, 2> explicit_range{ends.first, ends.second};
  const auto [nothing, edges] = at::histogram(piece_of(x).new_empty({0}), bins, explicit_range);
  Tensor hist = counted(x, x.sizes(), weight, nothing, [&](const Tensor& t, const MaybeTensor& w) {
    return std::get<0>(at::histogram(t, bins, explicit_range, w, false));
  });
  if (density) hist = hist / (edges.diff() * hist.sum());
  return {hist, edges};
}

Pair histogram_by_edges(const Tensor& x, const Tensor& edges_arg, const MaybeTensor& weight,
                        bool density) {
  const at::NoGradGuard no_grad;
  const Tensor edges = tensor::gather(edges_arg);
  if (!is_sharded(x))
    return at::histogram(x, edges, weight ? MaybeTensor(tensor::gather(*weight)) : weight, density);
  const Tensor nothing =
      std::get<0>(at::histogram(piece_of(x).new_empty({0}), edges, MaybeTensor(), false));
  Tensor hist = counted(x, x.sizes(), weight, nothing, [&](const Tensor& t, const MaybeTensor& w) {
    return std::get<0>(at::histogram(t, edges, w, false));
  });
  if (density) hist = hist / (edges.diff() * hist.sum());
  return {hist, edges.clone()};
}

}  // namespace

SHARDFIELD_OPS(histogram) {
  table.composed("aten::histc", TORCH_FN(histc));
  table.composed("aten::bincount", TORCH_FN(bincount));
  table.composed("aten::histogram.bin_ct", TORCH_FN(histogram_by_count));
  table.composed("aten::histogram.bins_tensor", TORCH_FN(histogram_by_edges));
}

}  // namespace shardfield::ops
