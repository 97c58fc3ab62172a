// flip, roll, repeat, tril and triu. Only rows that end up on another rank move, each straight to
// its new owner.

#include <numeric>

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/exchange/rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/spec/rows.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

Tensor flip_sharded(const Tensor& input, at::IntArrayRef dims) {
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return at::flip(x, dims);
  const Layout& layout = layout_of(x);
  std::vector<int64_t> whole;
  std::vector<bool> seen(x.dim());
  Tensor piece = tensor::local(x);
  for (int64_t d : dims) {
    d = at::maybe_wrap_dim(d, x.dim());
    SHARDFIELD_CHECK(!seen[d], "flip", "dim ", d, " appears twice in ", dims);
    seen[d] = true;
    const int c = layout.cut_on(static_cast<int>(d));
    if (c < 0) {
      whole.push_back(d);
    } else {
      const auto plan = spec::flip_plan(layout.cuts()[c].sizes);
      piece = exchange::exchange_rows(piece, exchange::row_exchange(layout, c, plan.wanted));
    }
  }
  if (!whole.empty() || dims.empty()) piece = at::flip(piece, whole);
  return tensor::wrap(piece, &layout, x.sizes(), x.suggest_memory_format());
}

/// All elements as one row, cut along the mesh axes that cut x.
Tensor flat(const Tensor& x) {
  Tensor row = x.reshape(-1);
  if (!is_sharded(row) || layout_of(row).is_simple(row.sizes().data())) return row;
  return tensor::redistribute(row, cut_over_all_axes(layout_of(row), 0, row.size(0)));
}

Tensor roll_sharded(const Tensor& input, c10::SymIntArrayRef sym_shifts, at::IntArrayRef dims) {
  const auto shifts = C10_AS_INTARRAYREF_SLOW(sym_shifts);
  SHARDFIELD_CHECK(
      !shifts.empty() && (dims.size() == shifts.size() || (dims.empty() && shifts.size() == 1)),
      "roll", "expected as many shifts as dims, got ", shifts, " and ", dims);
  const Tensor x = dims.empty() ? flat(input) : with_simple_cuts(input);
  if (!is_sharded(x)) return at::roll(x, shifts, dims).view(input.sizes());
  const Layout& layout = layout_of(x);
  std::vector<int64_t> whole_dims, whole_shifts;
  Tensor piece = tensor::local(x);
  for (size_t i = 0; i < shifts.size(); ++i) {
    const int64_t d = dims.empty() ? 0 : at::maybe_wrap_dim(dims[i], x.dim());
    const int c = layout.cut_on(static_cast<int>(d));
    if (c < 0) {
      whole_dims.push_back(d);
      whole_shifts.push_back(shifts[i]);
    } else if (x.size(d) > 0) {
      const auto plan = spec::roll_plan(layout.cuts()[c].sizes, shifts[i]);
      piece = exchange::exchange_rows(piece, exchange::row_exchange(layout, c, plan.wanted));
    }
  }
  if (!whole_dims.empty()) piece = at::roll(piece, whole_shifts, whole_dims);
  const Tensor out = tensor::wrap(piece, &layout, x.sizes());
  return dims.empty() ? out.reshape(input.sizes()) : out;
}

Tensor repeat_sharded(const Tensor& input, c10::SymIntArrayRef sym_repeats) {
  const auto repeats = C10_AS_INTARRAYREF_SLOW(sym_repeats);
  SHARDFIELD_CHECK(static_cast<int64_t>(repeats.size()) >= input.dim(), "repeat",
                   "expected at least ", input.dim(), " counts, got ", repeats);
  Tensor x = with_simple_cuts(input);
  const int64_t shift = static_cast<int64_t>(repeats.size()) - x.dim();
  for (int64_t i = 0; i < shift; ++i) x = x.unsqueeze(0);
  // Copies along a cut dim are joined there; the others are local.
  std::vector<int64_t> local_repeats = repeats.vec();
  for (int64_t d = 0; d < x.dim(); ++d) {
    if (!is_sharded(x) || !layout_of(x).is_cut(static_cast<int>(d)) || repeats[d] == 1) continue;
    local_repeats[d] = 1;
    x = repeats[d] == 0 ? x.narrow(d, 0, 0) : at::cat(std::vector<Tensor>(repeats[d], x), d);
  }
  if (!is_sharded(x)) return x.repeat(local_repeats);
  std::vector<int64_t> sizes = x.sizes().vec();
  for (int64_t d = 0; d < x.dim(); ++d) sizes[d] *= local_repeats[d];
  return tensor::wrap(tensor::local(x).repeat(local_repeats), &layout_of(x), sizes);
}

/// As PyTorch builds it: flips and a transposition.
Tensor rot90_sharded(const Tensor& x, int64_t k, at::IntArrayRef dims) {
  SHARDFIELD_CHECK(dims.size() == 2 && x.dim() >= 2, "rot90", "expected 2 rotation dims, got ",
                   dims, " for ", x.sizes());
  const int64_t a = at::maybe_wrap_dim(dims[0], x.dim()), b = at::maybe_wrap_dim(dims[1], x.dim());
  SHARDFIELD_CHECK(a != b, "rot90", "expected two different rotation dims, got ", dims);
  switch ((k % 4 + 4) % 4) {
    case 1:
      return x.flip({b}).transpose(a, b);
    case 2:
      return x.flip({a, b});
    case 3:
      return x.flip({a}).transpose(a, b);
    default:
      return x.clone();
  }
}

Tensor narrow_copy_sharded(const Tensor& x, int64_t dim, c10::SymInt start, c10::SymInt length) {
  return x.narrow_symint(dim, start, length).clone();
}

// tril and triu: the diagonal as it runs through this rank's block.

int64_t block_diagonal(const Tensor& x, int64_t diagonal) {
  SHARDFIELD_CHECK(x.dim() >= 2, "tril/triu", "expected at least 2 dims, got ", x.sizes());
  const Layout& layout = layout_of(x);
  const auto start = [&](int64_t dim) {
    const int c = layout.cut_on(static_cast<int>(dim));
    return c < 0 ? 0 : layout.local_offset(c);
  };
  return diagonal + start(x.dim() - 2) - start(x.dim() - 1);
}

Tensor triangle(const Tensor& input, int64_t diagonal, bool lower) {
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return lower ? at::tril(x, diagonal) : at::triu(x, diagonal);
  const int64_t k = block_diagonal(x, diagonal);
  const Tensor piece = tensor::local(x);
  return tensor::wrap(lower ? at::tril(piece, k) : at::triu(piece, k), &layout_of(x), x.sizes());
}
Tensor tril_sharded(const Tensor& x, c10::SymInt diagonal) {
  return triangle(x, diagonal.expect_int(), true);
}
Tensor triu_sharded(const Tensor& x, c10::SymInt diagonal) {
  return triangle(x, diagonal.expect_int(), false);
}

}  // namespace

SHARDFIELD_OPS(rearrange) {
  table.composed("aten::flip", TORCH_FN(flip_sharded));
  table.composed("aten::roll", TORCH_FN(roll_sharded));
  table.composed("aten::repeat", TORCH_FN(repeat_sharded));
  table.composed("aten::rot90", TORCH_FN(rot90_sharded));
  table.composed("aten::narrow_copy", TORCH_FN(narrow_copy_sharded));
  table.composed("aten::tril", TORCH_FN(tril_sharded));
  table.composed("aten::triu", TORCH_FN(triu_sharded));
}

}  // namespace shardfield::ops
