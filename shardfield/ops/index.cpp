// Reading by index: x[idx], x[mask], index_select, gather, embedding. Along whole dims every rank
// reads its own piece. Along a cut dim a list of rows is fetched row by row from the owners; other
// forms move the cut to another dim first.

#include "shardfield/ops/index.h"

#include <numeric>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/exchange/rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/listed_rows.h"
#include "shardfield/spec/range.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

const spec::Layout* cut_on_first(const at::Tensor& x, int64_t first, int64_t count) {
  const spec::Layout& layout = tensor::layout_of(x);
  std::vector<spec::Cut> kept, masked;
  for (const spec::Cut& cut : layout.cuts())
    (cut.dim >= first && cut.dim < first + count ? masked : kept).push_back(cut);
  if (masked.empty() || (masked.size() == 1 && masked[0].dim == first)) return &layout;
  spec::Cut all{static_cast<int>(first), {}, {}};
  int64_t pieces = 1;
  for (const spec::Cut& cut : masked) {
    all.axes.insert(all.axes.end(), cut.axes.begin(), cut.axes.end());
    pieces *= static_cast<int64_t>(cut.sizes.size());
  }
  all.sizes = spec::balanced_sizes(x.size(first), pieces);
  kept.push_back(all);
  return spec::intern_layout(layout.mesh(), std::move(kept));
}

RequestedList request_list(const char* op, const at::Tensor& x, int64_t dim,
                           const at::Tensor& index, bool wraps) {
  if (!tensor::is_sharded(x) || !tensor::is_sharded(index)) return {};
  const spec::Layout &layout = tensor::layout_of(x), &of_index = tensor::layout_of(index);
  const int c = layout.cut_on(static_cast<int>(dim));
  if (c < 0 || &layout.mesh() != &of_index.mesh()) return {};
  if (!layout.is_simple(x.sizes().data()) || !of_index.is_simple(index.sizes().data())) return {};
  const auto cuts_index = [&](int a) { return std::ranges::binary_search(of_index.axes(), a); };
  RequestedList list;
  std::vector<spec::Cut> cuts;
  for (spec::Cut cut : of_index.cuts()) {
    cut.dim += static_cast<int>(dim);
    cuts.push_back(std::move(cut));
  }
  for (spec::Cut cut : layout.cuts()) {
    const bool is_read = cut.dim == dim;
    if (is_read ? !std::ranges::all_of(cut.axes, cuts_index)
                : std::ranges::any_of(cut.axes, cuts_index))
      return {};
    if (is_read) continue;
    if (cut.dim > dim) cut.dim += static_cast<int>(index.dim()) - 1;
    cuts.push_back(std::move(cut));
  }
  std::ranges::set_difference(of_index.axes(), layout.axes(), std::back_inserter(list.other_axes));
  const int64_t n = x.size(dim), least = wraps ? -n : 0;
  const at::Tensor own = tensor::piece_of(index).to(at::kLong).flatten();
  at::Tensor ends = at::tensor({-n, -n}, own.options());
  if (own.numel() > 0) ends = at::stack({own.max(), own.min().neg()});
  ends = comm::all_reduce(ends, layout.mesh(), of_index.axes(), comm::Reduction::kMax);
  const int64_t high = ends[0].item<int64_t>(), low = -ends[1].item<int64_t>();
  TORCH_CHECK_INDEX(index.numel() == 0 || (low >= least && high < n), op, ": index ",
                    low < least ? low : high, " is out of bounds for dim ", dim, " of size ", n,
                    " of ", tensor::describe(x));
  list.sizes = x.sizes().slice(0, dim).vec();
  list.sizes.insert(list.sizes.end(), index.sizes().begin(), index.sizes().end());
  for (int64_t d = dim + 1; d < x.dim(); ++d) list.sizes.push_back(x.size(d));
  list.layout = spec::intern_layout(layout.mesh(), std::move(cuts));
  list.cut = static_cast<size_t>(c);
  if (index.dim() == 1) {
    std::vector<int> along(x.dim(), -1);
    along[dim] = 0;
    spec::remember_listed_rows(&of_index, spec::renumber(layout, along));
  }
  list.rows =
      std::make_shared<const exchange::RequestedRows>(layout, c, at::where(own < 0, own + n, own));
  return list;
}

std::vector<int64_t> selected_counts(const spec::Layout& layout, size_t c, int64_t mine,
                                     c10::Device device) {
  const spec::Mesh& mesh = layout.mesh();
  const auto all = comm::all_gather_ints({mine}, mesh, device);
  std::vector<int64_t> counts(layout.cuts()[c].sizes.size());
  for (int r = 0; r < mesh.size(); ++r) {
    const auto coord = mesh.coord_of(r);
    counts[layout.cuts()[c].piece_at(mesh, coord)] = all[r][0];
  }
  return counts;
}

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

// One list of rows along one dim.

std::vector<spec::Segment> segments_of(const int64_t* rows, int64_t count) {
  std::vector<spec::Segment> out;
  for (int64_t i = 0; i < count; ++i) {
    if (!out.empty() && out.back().start + out.back().count == rows[i]) {
      ++out.back().count;
    } else {
      out.push_back({rows[i], 1, 1});
    }
  }
  if (out.empty()) out.push_back({0, 0, 1});
  return out;
}

/// Rows of a cut dim, fetched from their owners; the result is cut evenly along it.
Tensor fetch_rows(const char* op, const Tensor& x, int64_t dim, const Tensor& index, bool wraps) {
  const int64_t n = x.size(dim);
  const Tensor list = index.to(at::kCPU, at::kLong).contiguous();
  std::vector<int64_t> rows(list.const_data_ptr<int64_t>(),
                            list.const_data_ptr<int64_t>() + list.numel());
  for (int64_t& row : rows) {
    TORCH_CHECK_INDEX(row >= (wraps ? -n : 0) && row < n, op, ": index ", row,
                      " is out of bounds for dim ", dim, " of size ", n);
    if (row < 0) row += n;
  }
  const Layout& layout = layout_of(x);
  const auto c = static_cast<size_t>(layout.cut_on(static_cast<int>(dim)));
  std::vector<Cut> cuts = layout.cuts();
  cuts[c].sizes = spec::balanced_sizes(list.numel(), static_cast<int64_t>(cuts[c].sizes.size()));
  std::vector<std::vector<spec::Segment>> wanted;
  for (const spec::Range& r : spec::ranges_of(cuts[c].sizes))
    wanted.push_back(segments_of(rows.data() + r.begin, r.size()));
  // Not kept: lists of rows seldom come twice.
  const auto plan = std::make_shared<const exchange::RowExchange>(layout, c, std::move(wanted));
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[dim] = list.numel();
  return tensor::wrap(exchange::exchange_rows(tensor::local(x), plan),
                      spec::intern_layout(layout.mesh(), std::move(cuts)), sizes);
}

/// Rows of a cut dim by a sharded index: neither is gathered.
std::optional<Tensor> fetch_requested_rows(const char* op, const Tensor& x, int64_t dim,
                                           const Tensor& index, bool wraps) {
  const RequestedList list = request_list(op, x, dim, index, wraps);
  if (!list.rows) return std::nullopt;
  const Tensor piece = tensor::enter(tensor::local(x), layout_of(x).mesh(), list.other_axes);
  const Tensor rows = exchange::fetch_requested(piece, list.rows);
  return tensor::wrap(rows.reshape(tensor::piece_sizes(*list.layout, list.sizes)), list.layout,
                      list.sizes);
}

Tensor index_select_sharded(const Tensor& input, int64_t dim, const Tensor& index) {
  dim = at::maybe_wrap_dim(dim, input.dim());
  SHARDFIELD_CHECK(index.dim() <= 1, "index_select", "index is supposed to be a vector, got ",
                   index.sizes());
  if (!is_sharded(input)) {
    const Layout& layout = layout_of(index);
    std::vector<int64_t> sizes = input.sizes().vec();
    sizes[dim] = index.numel();
    const Tensor piece = at::index_select(tensor::enter(input, layout), dim, tensor::local(index));
    return tensor::wrap(piece, spec::renumber(layout, std::vector<int>{static_cast<int>(dim)}),
                        sizes);
  }
  const Tensor x = with_simple_cuts(input);
  if (const auto rows = fetch_requested_rows("index_select", x, dim, index, false)) return *rows;
  const Tensor rows = tensor::gather(index).reshape(-1);
  if (!is_sharded(x)) return at::index_select(x, dim, rows);
  if (layout_of(x).is_cut(static_cast<int>(dim)))
    return fetch_rows("index_select", x, dim, rows, false);
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes[dim] = rows.numel();
  return tensor::wrap(at::index_select(tensor::local(x), dim, rows), &layout_of(x), sizes);
}

// x[i, j, ...] with index tensors.

bool is_mask(const Tensor& t) {
  return t.scalar_type() == at::kBool || t.scalar_type() == at::kByte;
}

c10::List<std::optional<Tensor>> as_list(const IndexList& indices) {
  c10::List<std::optional<Tensor>> list;
  for (const Tensor& t : indices)
    list.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
  return list;
}

/// x[:, mask] where the mask covers dims from `first` on. The result is cut by how many elements
/// each rank selects.
Tensor select_by_mask(const Tensor& input, int64_t first, const Tensor& mask) {
  const int64_t count = mask.dim();
  SHARDFIELD_CHECK(input.sizes().slice(first, count) == mask.sizes(), "index",
                   "the mask has sizes ", mask.sizes(), " but the indexed dims have ",
                   input.sizes().slice(first, count));
  Tensor x = with_simple_cuts(input);
  if (!is_sharded(x) && is_sharded(mask)) {
    const Tensor m = with_simple_cuts(mask);
    std::vector<int> dims(count);
    for (int64_t d = 0; d < count; ++d) dims[d] = static_cast<int>(first + d);
    if (is_sharded(m)) x = tensor::redistribute(x, spec::renumber(layout_of(m), dims));
  }
  IndexList indices(first);
  if (!is_sharded(x)) {
    indices.push_back(tensor::gather(mask));
    return at::index(x, as_list(indices));
  }
  const Layout* layout = cut_on_first(x, first, count);
  x = tensor::redistribute(x, layout);
  std::vector<int> mask_dim(x.dim(), -1), new_dim(x.dim(), -1);
  for (int64_t d = 0; d < x.dim(); ++d) {
    const auto i = static_cast<int>(d);
    if (d >= first && d < first + count) mask_dim[d] = static_cast<int>(d - first);
    new_dim[d] = d <= first ? i : d < first + count ? -1 : i - static_cast<int>(count) + 1;
  }
  const Layout* of_mask = spec::renumber(*layout, mask_dim);
  const Tensor piece_mask =
      of_mask ? tensor::piece_for(mask, *of_mask, mask.sizes()) : tensor::gather(mask);
  indices.push_back(piece_mask);
  const Tensor piece = at::index(tensor::local(x), as_list(indices));
  std::vector<Cut> cuts;
  int64_t selected = piece.size(first);
  for (size_t c = 0; c < layout->cuts().size(); ++c) {
    Cut cut = layout->cuts()[c];
    if (cut.dim == first) {
      cut.sizes = selected_counts(*layout, c, piece.size(first), x.device());
      selected = cut.total();
    }
    cut.dim = new_dim[cut.dim];
    cuts.push_back(cut);
  }
  std::vector<int64_t> sizes = x.sizes().slice(0, first).vec();
  sizes.push_back(selected);
  for (int64_t d = first + count; d < x.dim(); ++d) sizes.push_back(x.size(d));
  return tensor::wrap(piece, spec::intern_layout(layout->mesh(), std::move(cuts)), sizes);
}

/// A plain table read by one sharded index tensor: every rank reads for its own piece.
Tensor read_table(const Tensor& table, int64_t dim, const Tensor& index) {
  const Layout& layout = layout_of(index);
  IndexList indices(dim);
  indices.push_back(tensor::local(index));
  const Tensor piece = at::index(tensor::enter(table, layout), as_list(indices));
  std::vector<int> new_dim(index.dim());
  for (int d = 0; d < index.dim(); ++d) new_dim[d] = d + static_cast<int>(dim);
  std::vector<int64_t> sizes = table.sizes().slice(0, dim).vec();
  sizes.insert(sizes.end(), index.sizes().begin(), index.sizes().end());
  for (int64_t d = dim + 1; d < table.dim(); ++d) sizes.push_back(table.size(d));
  return tensor::wrap(piece, spec::renumber(layout, new_dim), sizes);
}

/// Index tensors on whole dims only: local.
Tensor index_whole_dims(const Tensor& x, const IndexList& indices) {
  const IndexShape shape(x.sizes(), indices);
  return tensor::wrap(at::index(tensor::local(x), as_list(indices)),
                      spec::renumber(layout_of(x), shape.new_dim), shape.sizes);
}

/// A plain table of row numbers (n, k) for a cut dim, cut along n: every rank fetches the rows of
/// its own lines, and the result is cut where the rows were.
Tensor with_cut_lines(const Tensor& x, int64_t dim, const Tensor& table) {
  if (!is_sharded(x) || is_sharded(table) || table.dim() < 2) return table;
  const spec::Cut* cut = nullptr;
  for (const spec::Cut& c : layout_of(x).cuts())
    if (c.dim == dim) cut = &c;
  const int64_t lines = table.size(0);
  if (!cut || lines < static_cast<int64_t>(cut->sizes.size())) return table;
  const auto sizes = lines == x.size(dim)
                         ? cut->sizes
                         : spec::chunk_sizes(lines, static_cast<int64_t>(cut->sizes.size()));
  return tensor::scatter_like(
      table, spec::intern_layout(layout_of(x).mesh(), {spec::Cut{0, cut->axes, sizes}}));
}

/// x[arange(n), label, ...]: vectors of one length, the cut dim's being all its rows in order.
/// Every rank reads its own rows.
std::optional<Tensor> index_own_rows(const Tensor& x, const IndexList& indices) {
  if (!is_sharded(x) || layout_of(x).cuts().size() != 1) return std::nullopt;
  const int dim = layout_of(x).cuts()[0].dim;
  if (dim >= static_cast<int>(indices.size()) || !indices[dim].defined()) return std::nullopt;
  const int64_t rows = x.size(dim);
  for (const Tensor& t : indices)
    if (t.defined() && (is_mask(t) || t.dim() != 1 || t.size(0) != rows)) return std::nullopt;
  if (is_sharded(indices[dim]) ||
      !at::equal(indices[dim], at::arange(rows, indices[dim].options())))
    return std::nullopt;
  const IndexShape shape(x.sizes(), indices);
  std::vector<int> as_vector(x.dim(), -1), as_result(x.dim(), -1);
  as_vector[dim] = 0;
  as_result[dim] = static_cast<int>(shape.start);
  const Layout* cut = spec::renumber(layout_of(x), as_vector);
  const Tensor piece = tensor::local(x);
  IndexList own = indices;
  for (Tensor& t : own)
    if (t.defined()) t = tensor::piece_for(t, *cut, rows);
  own[dim] = at::arange(piece.size(dim), own[dim].options());
  return tensor::wrap(at::index(piece, as_list(own)), spec::renumber(layout_of(x), as_result),
                      shape.sizes);
}

Tensor index_sharded(const Tensor& self, const c10::List<std::optional<Tensor>>& list) {
  IndexList indices;
  int64_t first = -1, defined = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::optional<Tensor> t = list.get(i);
    indices.push_back(t.value_or(Tensor()));
    if (!indices.back().defined()) continue;
    if (++defined == 1) first = static_cast<int64_t>(i);
  }
  if (defined == 0) return tensor::is_sharded(self) ? self.alias() : self;
  const Tensor only = indices[first];
  if (defined == 1 && is_mask(only) && only.dim() > 0) return select_by_mask(self, first, only);
  if (!is_sharded(self) && defined == 1 && is_sharded(only)) return read_table(self, first, only);
  Tensor x = with_simple_cuts(self);
  if (defined == 1 && !is_mask(only))
    if (const auto rows =
            fetch_requested_rows("index", x, first, with_cut_lines(x, first, only), true))
      return *rows;
  if (const auto rows = index_own_rows(x, indices)) return *rows;
  indices = plain_indices(x, indices);
  if (!is_sharded(x)) return at::index(x, as_list(indices));
  if (defined == 1 && only.dim() == 1 && layout_of(x).is_cut(static_cast<int>(first)))
    return fetch_rows("index", x, first, indices[first], true);
  std::vector<int64_t> indexed;
  for (size_t d = 0; d < indices.size(); ++d)
    if (indices[d].defined()) indexed.push_back(static_cast<int64_t>(d));
  for (int64_t d : indexed) x = with_whole_dim("index", x, d, indexed);
  return is_sharded(x) ? index_whole_dims(x, indices) : at::index(x, as_list(indices));
}

Tensor masked_select_sharded(const Tensor& self, const Tensor& mask) {
  const auto sizes = at::infer_size(self.sizes(), mask.sizes());
  const Tensor x = self.sizes() == at::IntArrayRef(sizes) ? self : self.expand(sizes);
  const Tensor m = mask.sizes() == at::IntArrayRef(sizes) ? mask : mask.expand(sizes);
  SHARDFIELD_CHECK(mask.scalar_type() == at::kBool, "masked_select", "expected a bool mask, got ",
                   mask.scalar_type());
  return select_by_mask(x, 0, m);
}

// gather: out[i][j] = self[index[i][j]][j].

Tensor gather_sharded(const Tensor& self, int64_t dim, const Tensor& index, bool sparse) {
  SHARDFIELD_CHECK(self.dim() == index.dim() && self.dim() > 0, "gather",
                   "index must have as many dims as input, got ", self.sizes(), " and ",
                   index.sizes());
  dim = at::maybe_wrap_dim(dim, self.dim());
  if (self.dim() == 1 && is_sharded(self)) {
    const Tensor read = self.index_select(0, index);
    return is_sharded(index) ? read : tensor::gather(read);
  }
  Tensor x = with_simple_cuts(self), i = with_simple_cuts(index);
  for (int64_t d = 0; d < x.dim(); ++d) {
    SHARDFIELD_CHECK(d == dim || index.size(d) <= self.size(d), "gather", "index sizes ",
                     index.sizes(), " exceed input sizes ", self.sizes(), " apart from dim ", dim);
    if (d != dim && index.size(d) < x.size(d)) x = x.narrow(d, 0, index.size(d));
  }
  x = with_whole_dim("gather", x, dim);
  if (!is_sharded(x) && !is_sharded(i)) return at::gather(x, dim, i, sparse);
  const Layout& layout = layout_of(is_sharded(x) ? x : i);
  const Layout* of_x = without_cuts_on(layout, dim);
  std::vector<int> foreign;
  for (int a : layout.axes())
    if (!of_x || !std::binary_search(of_x->axes().begin(), of_x->axes().end(), a))
      foreign.push_back(a);
  x = tensor::redistribute(x, of_x);
  const Tensor piece = tensor::enter(of_x ? tensor::local(x) : x, layout.mesh(), foreign);
  const Tensor rows = tensor::piece_for(i, layout, index.sizes());
  return tensor::wrap(at::gather(piece, dim, rows, sparse), &layout, index.sizes());
}

Tensor embedding_sharded(const Tensor& weight, const Tensor& indices, c10::SymInt padding_idx,
                         bool by_freq, bool /*sparse*/) {
  std::vector<int64_t> sizes = indices.sizes().vec();
  sizes.push_back(weight.size(1));
  if (!is_sharded(weight) && !by_freq) {
    const Layout& layout = layout_of(indices);
    const Tensor piece = at::embedding_symint(tensor::enter(weight, layout), tensor::local(indices),
                                              padding_idx, false, false);
    return tensor::wrap(piece, &layout, sizes);
  }
  // Frequencies count over all ranks; a cut table is read by columns.
  const Layout* result = is_sharded(indices) ? &layout_of(indices) : nullptr;
  const Tensor rows = tensor::gather(indices);
  const Tensor table = with_whole_dim("embedding", with_simple_cuts(weight), 0);
  if (!is_sharded(table))
    return tensor::scatter_like(at::embedding_symint(table, rows, padding_idx, by_freq, false),
                                result);
  const Layout* columns =
      spec::renumber(layout_of(table), std::vector<int>{-1, static_cast<int>(indices.dim())});
  const Tensor out =
      tensor::wrap(at::embedding_symint(tensor::local(table), rows, padding_idx, by_freq, false),
                   columns, sizes);
  return result ? tensor::redistribute(out, result) : out;
}

Tensor one_hot_sharded(const Tensor& x, int64_t classes) {
  if (classes < 0) classes = x.numel() > 0 ? x.max().item<int64_t>() + 1 : 0;
  std::vector<int64_t> sizes = x.sizes().vec();
  sizes.push_back(classes);
  return tensor::wrap(at::one_hot(tensor::piece_of(x), classes), &layout_of(x), sizes);
}

/// Elements by their row-major number.
Tensor take(const Tensor& self, const Tensor& index) {
  const Tensor flat = self.reshape(-1);
  if (is_sharded(index)) return at::index(flat, {index});
  return tensor::gather(at::index(flat, {index.reshape(-1)})).view(index.sizes());
}

}  // namespace

IndexShape::IndexShape(at::IntArrayRef source, const IndexList& indices)
    : new_dim(source.size(), -1) {
  std::vector<int64_t> shape;
  int64_t first = -1, last = -1, count = 0;
  for (size_t d = 0; d < indices.size(); ++d) {
    if (!indices[d].defined()) continue;
    shape = at::infer_size(shape, indices[d].sizes());
    if (first < 0) first = static_cast<int64_t>(d);
    last = static_cast<int64_t>(d);
    ++count;
  }
  // Index dims stand where adjacent indices stood, else in front.
  start = last - first + 1 == count ? first : 0;
  index_dims = static_cast<int64_t>(shape.size());
  std::vector<int64_t> rest;
  for (int64_t d = 0; d < static_cast<int64_t>(source.size()); ++d) {
    if (d < static_cast<int64_t>(indices.size()) && indices[d].defined()) continue;
    const auto place = static_cast<int64_t>(rest.size());
    new_dim[d] = static_cast<int>(place < start ? place : place + index_dims);
    rest.push_back(source[d]);
  }
  sizes.assign(rest.begin(), rest.begin() + start);
  sizes.insert(sizes.end(), shape.begin(), shape.end());
  sizes.insert(sizes.end(), rest.begin() + start, rest.end());
  index_sizes = std::move(shape);
}

IndexList plain_indices(const Tensor& x, const IndexList& indices) {
  IndexList out;
  for (const Tensor& t : indices) {
    if (!t.defined()) {
      out.push_back(t);
      continue;
    }
    const Tensor full = tensor::gather(t);
    if (!is_mask(full)) {
      out.push_back(full.to(at::kLong));
      continue;
    }
    for (int64_t d = 0; d < full.dim(); ++d) {
      const auto at = static_cast<int64_t>(out.size()) + d;
      TORCH_CHECK_INDEX(at < x.dim() && full.size(d) == x.size(at), "index: the mask has sizes ",
                        full.sizes(), ", which do not match those of the indexed tensor ",
                        x.sizes(), " at dim ", at);
    }
    for (Tensor& rows : full.nonzero_numpy()) out.push_back(rows);
  }
  SHARDFIELD_CHECK(static_cast<int64_t>(out.size()) <= x.dim(), "index", "too many indices (",
                   out.size(), ") for a tensor of ", x.dim(), " dims");
  return out;
}

SHARDFIELD_OPS(index) {
  table.composed("aten::take", TORCH_FN(take));
  table.composed("aten::index.Tensor", TORCH_FN(index_sharded));
  table.composed("aten::_unsafe_index.Tensor", TORCH_FN(index_sharded));
  table.composed("aten::index_select", TORCH_FN(index_select_sharded));
  table.composed("aten::masked_select", TORCH_FN(masked_select_sharded));
  table.composed("aten::gather", TORCH_FN(gather_sharded));
  table.composed("aten::embedding", TORCH_FN(embedding_sharded));
  table.composed("aten::one_hot", TORCH_FN(one_hot_sharded));
}

}  // namespace shardfield::ops
