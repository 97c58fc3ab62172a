#include "shardfield/ops/whole_dims.h"

#include <algorithm>
#include <numeric>

#include "shardfield/dispatch/boxed.h"
#include "shardfield/spec/range.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;

bool contains(at::IntArrayRef dims, int64_t d) {
  return std::find(dims.begin(), dims.end(), d) != dims.end();
}

/// The longest dim that may take over a cut, or -1. Some pieces may be left empty.
int64_t free_dim(const Tensor& x, const std::vector<Cut>& cuts, int64_t dim, at::IntArrayRef busy) {
  int64_t best = -1;
  for (int64_t d = 0; d < x.dim(); ++d) {
    const bool cut =
        std::any_of(cuts.begin(), cuts.end(), [&](const Cut& c) { return c.dim == d; });
    if (d == dim || cut || contains(busy, d) || x.size(d) < 2) continue;
    if (best < 0 || x.size(d) > x.size(best)) best = d;
  }
  return best;
}

/// The cut with the longest pieces, which finer ones make shorter (some may be left empty), or
/// null.
Cut* finer_cut(const Tensor& x, std::vector<Cut>& cuts, at::IntArrayRef busy) {
  const auto piece_length = [&](const Cut& cut) {
    return static_cast<double>(x.size(cut.dim)) / static_cast<double>(cut.sizes.size());
  };
  Cut* best = nullptr;
  for (Cut& cut : cuts)
    if (!contains(busy, cut.dim) && (!best || piece_length(cut) > piece_length(*best))) best = &cut;
  return best;
}

}  // namespace

const Layout* without_cuts_on(const Layout& layout, at::IntArrayRef dims) {
  std::vector<Cut> cuts;
  for (const Cut& cut : layout.cuts())
    if (!contains(dims, cut.dim)) cuts.push_back(cut);
  return spec::intern_layout(layout.mesh(), std::move(cuts));
}

const Layout* cut_over_all_axes(const Layout& layout, int dim, int64_t size) {
  int64_t pieces = 1;
  for (const int axis : layout.axes()) pieces *= layout.mesh().shape[axis];
  return spec::intern_layout(layout.mesh(),
                             {{dim, layout.axes(), spec::balanced_sizes(size, pieces)}});
}

const Layout* cut_of_copy(const Layout& layout, at::IntArrayRef sizes) {
  const auto longest = std::ranges::max_element(sizes);
  if (longest == sizes.end() || *longest < 2) return nullptr;
  return cut_over_all_axes(layout, static_cast<int>(longest - sizes.begin()), *longest);
}

Tensor with_whole_dim(const char* op, const Tensor& x, int64_t dim, at::IntArrayRef busy) {
  if (!tensor::is_sharded(x)) return x;
  const Layout& layout = tensor::layout_of(x);
  std::vector<Cut> kept, moving;
  for (const Cut& cut : layout.cuts()) (cut.dim == dim ? moving : kept).push_back(cut);
  if (moving.empty()) return x;
  if (!layout.is_simple(x.sizes().data())) {
    dispatch::report_fallback(op, x);
    return tensor::redistribute(x, spec::intern_layout(layout.mesh(), std::move(kept)));
  }
  Cut cut = moving[0];
  const auto pieces = static_cast<int64_t>(cut.sizes.size());
  cut.dim = static_cast<int>(free_dim(x, kept, dim, busy));
  if (cut.dim >= 0) {
    cut.sizes = spec::balanced_sizes(x.size(cut.dim), pieces);
    kept.push_back(std::move(cut));
  } else if (Cut* other = finer_cut(x, kept, busy)) {
    other->axes.insert(other->axes.end(), cut.axes.begin(), cut.axes.end());
    other->sizes = spec::balanced_sizes(x.size(other->dim),
                                        pieces * static_cast<int64_t>(other->sizes.size()));
  } else {
    dispatch::report_fallback(op, x);
  }
  return tensor::redistribute(x, spec::intern_layout(layout.mesh(), std::move(kept)));
}

Tensor with_simple_cuts(const Tensor& x) {
  if (!tensor::is_sharded(x)) return x;
  const Layout& layout = tensor::layout_of(x);
  if (layout.is_simple(x.sizes().data())) return x;
  std::vector<Cut> simple;
  for (int d = 0; d < x.dim(); ++d) {
    Cut block{d, {}, {}};
    int64_t pieces = 1;
    for (const Cut& cut : layout.cuts()) {
      if (cut.dim != d) continue;
      block.axes.insert(block.axes.end(), cut.axes.begin(), cut.axes.end());
      block.sizes = cut.sizes;
      pieces *= static_cast<int64_t>(cut.sizes.size());
    }
    if (block.axes.empty()) continue;
    const bool as_it_was =
        static_cast<int64_t>(block.sizes.size()) == pieces && block.total() == x.size(d);
    if (!as_it_was) block.sizes = spec::chunk_sizes(x.size(d), pieces);
    simple.push_back(std::move(block));
  }
  return tensor::redistribute(x, spec::intern_layout(layout.mesh(), std::move(simple)));
}

}  // namespace shardfield::ops
