// Cumulative ops. Along a cut dim every rank scans its own piece and takes in what the pieces
// before it come to: one row per rank travels, whatever the length (a distributed exclusive scan;
// Blelloch, "Prefix sums and their applications", 1990).

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using Pair = std::tuple<Tensor, Tensor>;
using Dtype = std::optional<at::ScalarType>;

/// A sharded input and the dim to scan.
struct Scan {
  Tensor x, piece;
  int64_t dim;
  int cut = -1;

  Scan(const Tensor& given, int64_t dim_arg)
      : x(with_simple_cuts(given)), dim(at::maybe_wrap_dim(dim_arg, given.dim())) {
    piece = is_sharded(x) ? tensor::local(x) : x;
    if (is_sharded(x)) cut = layout_of(x).cut_on(static_cast<int>(dim));
  }
  bool is_local() const { return cut < 0; }
  Tensor wrap(const Tensor& result) const {
    return is_sharded(x) ? tensor::wrap(result, &layout_of(x), x.sizes()) : result;
  }
  /// One row per piece along `dim`, all of them on every rank of the cut; each rank's gradient of
  /// it is its own.
  Tensor rows_of_all(const Tensor& own_row) const {
    const Layout& layout = layout_of(x);
    const spec::Cut& c = layout.cuts()[cut];
    std::vector<int64_t> sizes = x.sizes().vec();
    sizes[dim] = static_cast<int64_t>(c.sizes.size());
    const Layout* one_each = with_piece_sizes(
        layout, {{static_cast<int>(dim), std::vector<int64_t>(c.sizes.size(), 1)}});
    const Tensor all = tensor::redistribute(tensor::wrap(own_row, one_each, sizes),
                                            without_cuts_on(layout, {dim}));
    return tensor::enter(is_sharded(all) ? tensor::local(all) : all, layout.mesh(), c.axes);
  }
  /// The rows of the pieces before this rank's that are not empty; none on the first.
  Tensor rows_before(const Tensor& own_row) const {
    const Layout& layout = layout_of(x);
    std::vector<int64_t> before;
    for (int p = 0; p < layout.piece(cut); ++p)
      if (layout.cuts()[cut].sizes[p] > 0) before.push_back(p);
    return rows_of_all(own_row).index_select(dim, index_tensor(before, own_row));
  }
  /// `result` as it is, in the graph of `rows` too, so that every rank's backward communicates.
  Tensor tied(const Tensor& result, const Tensor& rows) const {
    return comm::records_grad(rows) ? result + rows.narrow(dim, 0, 0).sum().to(result.scalar_type())
                                    : result;
  }
};

Tensor cumsum(const Tensor& x, int64_t dim, Dtype dtype) {
  const Scan s(x, dim);
  const Tensor own = at::cumsum(s.piece, s.dim, dtype);
  if (s.is_local() || x.dim() == 0) return s.wrap(own);
  const Tensor before = s.rows_before(s.piece.sum({s.dim}, true, dtype));
  return s.wrap(own + before.sum({s.dim}, true));
}

Tensor cumprod(const Tensor& x, int64_t dim, Dtype dtype) {
  const Scan s(x, dim);
  const Tensor own = at::cumprod(s.piece, s.dim, dtype);
  if (s.is_local() || x.dim() == 0) return s.wrap(own);
  const Tensor before = s.rows_before(s.piece.prod(s.dim, true, dtype));
  return s.wrap(own * before.prod(s.dim, true));
}

Tensor logcumsumexp(const Tensor& x, int64_t dim) {
  const Scan s(x, dim);
  const Tensor own = at::logcumsumexp(s.piece, s.dim);
  if (s.is_local() || x.dim() == 0) return s.wrap(own);
  const Tensor before = s.rows_before(at::logsumexp(s.piece, {s.dim}, true));
  // No rows before mean minus infinity, whose derivative would be NaN.
  return s.wrap(before.size(s.dim) == 0 ? s.tied(own, before)
                                        : at::logaddexp(own, at::logsumexp(before, {s.dim}, true)));
}

/// Value and global position of the running extremum; of equal ones the last counts, NaN wins.
template <bool is_max>
Pair cumulative_extremum(const Tensor& x, int64_t dim) {
  const Scan s(x, dim);
  const auto scan = [&](const Tensor& t) -> Pair {
    // PyTorch's gradient of nothing is the input: a second derivative would end on this rank.
    if (t.numel() == 0) return {t.clone(), at::zeros(t.sizes(), t.options().dtype(at::kLong))};
    return is_max ? at::cummax(t, s.dim) : at::cummin(t, s.dim);
  };
  auto [own, position] = scan(s.piece);
  if (s.is_local() || x.dim() == 0) return {s.wrap(own), s.wrap(position)};
  const Layout& layout = layout_of(s.x);
  position = position + layout.local_offset(s.cut);
  const bool empty = s.piece.size(s.dim) == 0;
  auto row_sizes = s.piece.sizes().vec();
  row_sizes[s.dim] = 1;
  // Nobody looks at the row of an empty piece.
  const Tensor last = empty ? empty_result(s.piece, row_sizes) : own.narrow(s.dim, -1, 1);
  const Tensor last_position =
      empty ? at::zeros(row_sizes, position.options()) : position.narrow(s.dim, -1, 1);
  const Tensor rows = s.rows_before(last), positions = s.rows_before(last_position);
  Tensor value = s.tied(own, rows);
  for (int64_t p = rows.size(s.dim); p-- > 0;) {
    const Tensor row = rows.narrow(s.dim, p, 1), at = positions.narrow(s.dim, p, 1);
    Tensor keeps = is_max ? value >= row : value <= row;
    keeps = keeps.logical_or(value.isnan());
    value = at::where(keeps, value, row);
    position = at::where(keeps, position, at);
  }
  return {s.wrap(value), s.wrap(position)};
}

}  // namespace

SHARDFIELD_OPS(scan) {
  table.composed("aten::cumsum", TORCH_FN(cumsum));
  table.composed("aten::cumprod", TORCH_FN(cumprod));
  table.composed("aten::logcumsumexp", TORCH_FN(logcumsumexp));
  table.composed("aten::cummax", TORCH_FN(cumulative_extremum<true>));
  table.composed("aten::cummin", TORCH_FN(cumulative_extremum<false>));
}

}  // namespace shardfield::ops
