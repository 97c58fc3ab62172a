// Distances between the rows of two tensors, x1 (..., P, M) and x2 (..., R, M) to (..., P, R). As
// in a matrix product, each mesh axis cuts the batch, the rows of x1 or the rows of x2: rows stay
// where they are, and the smaller side is brought whole along the axes that cut the larger one.

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

/// The dim of the result (..., P, R) that a dim of an operand becomes; -1 for features and batch
/// dims that are broadcast.
int result_dim(const Tensor& t, int dim, bool is_first, at::IntArrayRef batch) {
  const int last = static_cast<int>(t.dim()) - 1, rank = static_cast<int>(batch.size()) + 2;
  if (dim == last) return -1;
  if (dim == last - 1) return is_first ? rank - 2 : rank - 1;
  const int at = dim + rank - 1 - last;
  return t.size(dim) == batch[at] ? at : -1;
}

bool clashes(const std::vector<Cut>& cuts, const Cut& cut) {
  return std::any_of(cuts.begin(), cuts.end(), [&](const Cut& other) {
    return other.dim == cut.dim || std::any_of(cut.axes.begin(), cut.axes.end(), [&](int axis) {
             return std::find(other.axes.begin(), other.axes.end(), axis) != other.axes.end();
           });
  });
}

void adopt(std::vector<Cut>& cuts, const Tensor& t, bool is_first, at::IntArrayRef batch) {
  if (!is_sharded(t)) return;
  for (Cut cut : layout_of(t).cuts()) {
    cut.dim = result_dim(t, cut.dim, is_first, batch);
    if (cut.dim >= 0 && !clashes(cuts, cut)) cuts.push_back(std::move(cut));
  }
}

/// This rank's part of an operand; its gradient sums over the axes along which it is whole.
Tensor operand(const Tensor& t, bool is_first, const Layout& result, at::IntArrayRef batch) {
  std::vector<Cut> cuts;
  std::vector<int> whole_axes;
  for (const Cut& cut : result.cuts()) {
    bool found = false;
    for (int d = 0; d < static_cast<int>(t.dim()); ++d) {
      if (result_dim(t, d, is_first, batch) != cut.dim) continue;
      cuts.push_back(cut);
      cuts.back().dim = d;
      found = true;
    }
    if (!found) whole_axes.insert(whole_axes.end(), cut.axes.begin(), cut.axes.end());
  }
  std::sort(whole_axes.begin(), whole_axes.end());
  const Layout* own = spec::intern_layout(result.mesh(), std::move(cuts));
  const Tensor moved = tensor::redistribute(t, own);
  return tensor::enter(own ? tensor::local(moved) : moved, result.mesh(), whole_axes);
}

template <class F>
Tensor distances(const Tensor& first, const Tensor& second, F&& run) {
  SHARDFIELD_CHECK(first.dim() >= 2 && second.dim() >= 2 && first.size(-1) == second.size(-1),
                   "cdist", "expected rows of one length in tensors of two or more dims, got ",
                   first.sizes(), " and ", second.sizes());
  const Tensor x1 = with_whole_dim("cdist", with_simple_cuts(first), first.dim() - 1);
  const Tensor x2 = with_whole_dim("cdist", with_simple_cuts(second), second.dim() - 1);
  const auto batch =
      at::infer_size(x1.sizes().slice(0, x1.dim() - 2), x2.sizes().slice(0, x2.dim() - 2));
  std::vector<Cut> cuts;
  const bool first_leads = !is_sharded(x2) || (is_sharded(x1) && x1.numel() >= x2.numel());
  adopt(cuts, first_leads ? x1 : x2, first_leads, batch);
  adopt(cuts, first_leads ? x2 : x1, !first_leads, batch);
  std::sort(cuts.begin(), cuts.end(), [](const Cut& a, const Cut& b) { return a.dim < b.dim; });
  const Layout* result =
      cuts.empty() ? nullptr
                   : spec::intern_layout(layout_of(is_sharded(x1) ? x1 : x2).mesh(), cuts);
  if (!result) return run(x1, x2);
  std::vector<int64_t> sizes = batch;
  sizes.push_back(x1.size(-2));
  sizes.push_back(x2.size(-2));
  return tensor::wrap(run(operand(x1, true, *result, batch), operand(x2, false, *result, batch)),
                      result, sizes);
}

Tensor cdist(const Tensor& x1, const Tensor& x2, double p, std::optional<int64_t> mode) {
  return distances(
      x1, x2, [&](const Tensor& a, const Tensor& b) { return at::_cdist_forward(a, b, p, mode); });
}

Tensor euclidean(const Tensor& x1, const Tensor& x2) {
  return distances(x1, x2,
                   [&](const Tensor& a, const Tensor& b) { return at::_euclidean_dist(a, b); });
}

}  // namespace

SHARDFIELD_OPS(distance) {
  table.composed("aten::_cdist_forward", TORCH_FN(cdist));
  table.composed("aten::_euclidean_dist", TORCH_FN(euclidean));
}

}  // namespace shardfield::ops
