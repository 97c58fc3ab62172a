// cat and stack. Along a dim that is not cut every rank joins its own pieces. Along the cut dim the
// result is cut so that every rank holds as many rows as it held of all operands, and only rows
// that cross those borders move.

#include <numeric>

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>
#include <ATen/native/TypeProperties.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/exchange/rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/range.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

/// cat skips 1-d tensors without elements, whatever the others look like.
bool is_legacy_empty(const Tensor& t) {
  return t.dim() == 1 && t.size(0) == 0;
}

std::vector<int64_t> joined_sizes(const std::vector<Tensor>& parts, int64_t dim) {
  std::vector<int64_t> sizes = parts[0].sizes().vec();
  for (size_t i = 1; i < parts.size(); ++i) {
    const Tensor& t = parts[i];
    bool fits = t.dim() == static_cast<int64_t>(sizes.size());
    for (int64_t d = 0; fits && d < t.dim(); ++d) fits = d == dim || t.size(d) == sizes[d];
    SHARDFIELD_CHECK(fits, "cat", "sizes of tensors must match except in dimension ", dim,
                     ": tensor 0 has ", parts[0].sizes(), ", tensor ", i, " has ", t.sizes());
    sizes[dim] += t.size(dim);
  }
  return sizes;
}

/// The largest sharded operand: to its layout the others are brought.
const Tensor* largest_sharded(const std::vector<Tensor>& parts) {
  const Tensor* best = nullptr;
  for (const Tensor& t : parts)
    if (is_sharded(t) && (!best || t.numel() > best->numel())) best = &t;
  return best;
}

/// The memory order the operands agree on, as cat chooses it.
at::MemoryFormat common_format(const std::vector<Tensor>& parts) {
  const auto format = parts[0].suggest_memory_format();
  const bool same = std::all_of(parts.begin(), parts.end(), [&](const Tensor& t) {
    return t.suggest_memory_format() == format;
  });
  return same ? format : at::MemoryFormat::Contiguous;
}

Tensor cat_pieces(const std::vector<Tensor>& pieces, int64_t dim, at::ScalarType dtype) {
  Tensor joined;
  if (pieces[0].dim() == 1) {
    // cat drops empty 1-d pieces from the graph: ranks would differ in what backward exchanges.
    std::vector<Tensor> columns;
    for (const Tensor& piece : pieces) columns.push_back(piece.unsqueeze(1));
    joined = at::cat(columns, 0).squeeze(1);
  } else {
    joined = at::cat(pieces, dim);
  }
  return joined.scalar_type() == dtype ? joined : joined.to(dtype);
}

/// Rows each rank gets of the result: what it held of every sharded operand. Plain operands are
/// everywhere already: a small one goes to the ranks beside it, a large one is spread.
std::vector<int64_t> result_cut(const std::vector<Tensor>& parts,
                                const std::vector<const Layout*>& layouts, int64_t dim) {
  std::vector<int64_t> sizes;
  int64_t sharded_rows = 0, plain_rows = 0, num_sharded = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Cut& cut = layouts[i]->cuts()[layouts[i]->cut_on(static_cast<int>(dim))];
    sizes.resize(cut.sizes.size());
    (is_sharded(parts[i]) ? sharded_rows : plain_rows) += parts[i].size(dim);
    num_sharded += is_sharded(parts[i]);
  }
  const auto n = static_cast<int64_t>(sizes.size());
  const bool few = num_sharded == 1 && plain_rows * n <= sharded_rows;
  bool before = true;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Cut& cut = layouts[i]->cuts()[layouts[i]->cut_on(static_cast<int>(dim))];
    if (is_sharded(parts[i])) before = false;
    if (!is_sharded(parts[i]) && few) {
      (before ? sizes.front() : sizes.back()) += parts[i].size(dim);
    } else {
      for (int64_t p = 0; p < n; ++p) sizes[p] += cut.sizes[p];
    }
  }
  return sizes;
}

/// Of one operand's rows [base, base + n) of the result, those each piece of the result holds.
std::vector<std::vector<spec::Segment>> rows_wanted(const std::vector<int64_t>& cut, int64_t base,
                                                    int64_t n) {
  std::vector<std::vector<spec::Segment>> wanted;
  for (const spec::Range& r : spec::ranges_of(cut)) {
    const int64_t begin = std::clamp<int64_t>(r.begin - base, 0, n);
    const int64_t end = std::clamp<int64_t>(r.end - base, begin, n);
    wanted.push_back({{begin, end - begin, 1}});
  }
  return wanted;
}

Tensor cat_along_cut(const std::vector<Tensor>& parts, const Layout& like, int64_t dim,
                     at::IntArrayRef sizes, at::ScalarType dtype) {
  const auto d = static_cast<int>(dim);
  const Cut& model = like.cuts()[like.cut_on(d)];
  const auto with_sizes = [&](std::vector<int64_t> rows) {
    std::vector<Cut> cuts = like.cuts();
    cuts[like.cut_on(d)].sizes = std::move(rows);
    return spec::intern_layout(like.mesh(), std::move(cuts));
  };
  // Every operand's own borders along dim where it is cut alike, even ones otherwise.
  std::vector<const Layout*> layouts;
  for (const Tensor& t : parts) {
    const int c = is_sharded(t) ? layout_of(t).cut_on(d) : -1;
    const bool own = c >= 0 && layout_of(t).cuts()[c].axes == model.axes &&
                     layout_of(t).is_simple(t.sizes().data());
    layouts.push_back(with_sizes(
        own ? layout_of(t).cuts()[c].sizes
            : spec::balanced_sizes(t.size(dim), static_cast<int64_t>(model.sizes.size()))));
  }
  const auto cut = result_cut(parts, layouts, dim);
  std::vector<Tensor> pieces;
  int64_t base = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    auto wanted = rows_wanted(cut, base, parts[i].size(dim));
    base += parts[i].size(dim);
    if (is_sharded(parts[i])) {
      const Tensor piece = tensor::local(tensor::redistribute(parts[i], layouts[i]));
      const auto plan =
          exchange::row_exchange(*layouts[i], layouts[i]->cut_on(d), std::move(wanted));
      pieces.push_back(exchange::exchange_rows(piece, plan));
    } else {
      std::vector<int64_t> rows;
      for (const auto& w : wanted) rows.push_back(w[0].count);
      pieces.push_back(tensor::local(tensor::redistribute(parts[i], with_sizes(std::move(rows)))));
    }
  }
  return tensor::wrap(cat_pieces(pieces, dim, dtype), with_sizes(cut), sizes, common_format(parts));
}

Tensor cat_sharded(const at::ITensorListRef& tensors, int64_t dim) {
  std::vector<Tensor> parts;
  std::vector<Tensor> all;
  for (const Tensor& t : tensors) {
    all.push_back(t);
    if (!is_legacy_empty(t)) parts.push_back(t);
  }
  const auto dtype = at::native::result_type(all);
  if (parts.empty()) return tensor::redistribute(all[0], nullptr).to(dtype);
  for (Tensor& t : parts) t = with_simple_cuts(t);
  const Tensor* model = largest_sharded(parts);
  if (!model) return at::cat(parts, dim).to(dtype);  // only empty ones were sharded
  dim = at::maybe_wrap_dim(dim, model->dim());
  const auto sizes = joined_sizes(parts, dim);
  const Layout& layout = layout_of(*model);
  if (layout.is_cut(static_cast<int>(dim))) return cat_along_cut(parts, layout, dim, sizes, dtype);
  std::vector<Tensor> pieces;
  for (const Tensor& t : parts) pieces.push_back(tensor::local(tensor::redistribute(t, &layout)));
  return tensor::wrap(cat_pieces(pieces, dim, dtype), &layout, sizes, common_format(parts));
}

Tensor stack_sharded(at::TensorList tensors, int64_t dim) {
  SHARDFIELD_CHECK(!tensors.empty(), "stack", "expected a non-empty list of tensors");
  dim = at::maybe_wrap_dim(dim, tensors[0].dim() + 1);
  std::vector<Tensor> rows;
  for (const Tensor& t : tensors) {
    SHARDFIELD_CHECK(t.sizes() == tensors[0].sizes(), "stack",
                     "expects each tensor to be equal size, but got ", tensors[0].sizes(),
                     " at entry 0 and ", t.sizes(), " at entry ", rows.size());
    rows.push_back(t.unsqueeze(dim));
  }
  return at::cat(rows, dim);
}

}  // namespace

SHARDFIELD_OPS(concatenate) {
  table.composed("aten::cat", TORCH_FN(cat_sharded));
  table.composed("aten::stack", TORCH_FN(stack_sharded));
}

}  // namespace shardfield::ops
