// Padding. A border that shows other rows (reflect, replicate, circular) is fetched from their
// owners in one exchange; constant borders are made by the end ranks. Interior rows stay put.

#include "shardfield/spec/pad.h"

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymIntArrayRef;
using spec::Cut;
using spec::Layout;
using spec::PadMode;
using tensor::is_sharded;

/// Padding of dim d in PyTorch's order (last dim first): index of its lower entry, or -1.
int64_t pad_entry(IntArrayRef pad, int64_t ndim, int64_t d) {
  const int64_t at = 2 * (ndim - 1 - d);
  return at + 1 < static_cast<int64_t>(pad.size()) ? at : -1;
}

void check_pad_of(const char* op, const Tensor& x, int64_t d, int64_t lo, int64_t hi,
                  PadMode mode) {
  const int64_t n = x.size(d);
  const int64_t most = std::max(lo, hi);
  SHARDFIELD_CHECK(n + lo + hi >= 0, op, "The input size ", n, ", plus negative padding ", lo,
                   " and ", hi,
                   ", resulted in a negative output size, which is invalid; dimension ", d, " of ",
                   tensor::describe(x));
  SHARDFIELD_CHECK(mode != PadMode::kReflect || most < std::max<int64_t>(n, 1), op,
                   "Padding size should be less than the corresponding input dimension, but got: "
                   "padding (",
                   lo, ", ", hi, ") at dimension ", d, " of ", tensor::describe(x));
  SHARDFIELD_CHECK(mode != PadMode::kCircular || most <= n, op,
                   "Padding value causes wrapping around more than once: (", lo, ", ", hi,
                   ") at dimension ", d, " of ", tensor::describe(x));
  SHARDFIELD_CHECK(mode == PadMode::kConstant || n > 0, op,
                   "expected rows to pad from, got none at "
                   "dimension ",
                   d, " of ", tensor::describe(x));
}

/// Pads the cut dims of the piece by exchange, the others by `pad_piece(piece, pad, is_empty)`.
template <class PadPiece>
Tensor pad_sharded(const char* op, const Tensor& x, IntArrayRef pad, PadMode mode,
                   PadPiece pad_piece) {
  SHARDFIELD_CHECK(pad.size() % 2 == 0 && static_cast<int64_t>(pad.size()) <= 2 * x.dim(), op,
                   "expected at most two paddings per dim, got ", pad, " for ",
                   tensor::describe(x));
  const Layout& layout = tensor::layout_of(x);
  auto sizes = x.sizes().vec();
  for (int64_t d = 0; d < x.dim(); ++d) {
    const int64_t at = pad_entry(pad, x.dim(), d);
    if (at < 0 || (pad[at] == 0 && pad[at + 1] == 0)) continue;
    check_pad_of(op, x, d, pad[at], pad[at + 1], mode);
    sizes[d] += pad[at] + pad[at + 1];
  }
  Tensor piece = tensor::local(x);
  auto rest = pad.vec();
  std::map<int, std::vector<int64_t>> piece_sizes;
  for (size_t c = 0; c < layout.cuts().size(); ++c) {
    const Cut& cut = layout.cuts()[c];
    const int64_t at = pad_entry(pad, x.dim(), cut.dim);
    if (at < 0 || (pad[at] == 0 && pad[at + 1] == 0)) continue;
    spec::PadPlan plan = spec::plan_pad(cut.sizes, pad[at], pad[at + 1], mode);
    const spec::PadPiece& own = plan.pieces[layout.piece(c)];
    rest[at] = own.zeros_lo;
    rest[at + 1] = own.zeros_hi;
    for (const auto& p : plan.pieces) piece_sizes[cut.dim].push_back(p.outputs.size());
    piece = fetch_rows(piece, layout, c, std::move(plan.rows.wanted));
  }
  const Layout* out = with_piece_sizes(layout, piece_sizes);
  const auto out_sizes = out->local_sizes(sizes.data(), static_cast<int>(x.dim()));
  return wrap_in_format_of(x, pad_piece(piece, rest, out_sizes), out, sizes);
}

Tensor constant_pad(const Tensor& input, SymIntArrayRef sym_pad, const at::Scalar& value) {
  const auto pad = C10_AS_INTARRAYREF_SLOW(sym_pad);
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return at::constant_pad_nd(x, pad, value);
  return pad_sharded("constant_pad_nd", x, pad, PadMode::kConstant,
                     [&](const Tensor& piece, IntArrayRef rest, IntArrayRef) {
                       return at::constant_pad_nd(piece, rest, value);
                     });
}

template <PadMode mode>
Tensor pad_by_rows(const char* op, const Tensor& input, SymIntArrayRef sym_pad,
                   Tensor (*stock)(const Tensor&, IntArrayRef)) {
  const auto pad = C10_AS_INTARRAYREF_SLOW(sym_pad);
  const Tensor x = with_simple_cuts(input);
  if (!is_sharded(x)) return stock(x, pad);
  return pad_sharded(op, x, pad, mode, [&](const Tensor& piece, IntArrayRef rest, IntArrayRef out) {
    const bool more = std::any_of(rest.begin(), rest.end(), [](int64_t p) { return p != 0; });
    if (piece.numel() == 0) {
      if (!more) return empty_result(piece, out);
      const Tensor block = grown_to(piece, std::vector<int64_t>(piece.dim(), 1));
      return empty_result_like(stock(block, std::vector<int64_t>(rest.size(), 0)), out);
    }
    if (more) return stock(piece, rest);
    return piece.is_alias_of(tensor::piece_of(x)) ? piece.clone() : piece;
  });
}

#define SHARDFIELD_PAD(name, mode)                                                     \
  Tensor name##_sharded(const Tensor& x, SymIntArrayRef pad) {                         \
    return pad_by_rows<PadMode::mode>(                                                 \
        #name, x, pad, [](const Tensor& t, IntArrayRef p) { return at::name(t, p); }); \
  }
SHARDFIELD_PAD(reflection_pad1d, kReflect)
SHARDFIELD_PAD(reflection_pad2d, kReflect)
SHARDFIELD_PAD(reflection_pad3d, kReflect)
SHARDFIELD_PAD(replication_pad1d, kReplicate)
SHARDFIELD_PAD(replication_pad2d, kReplicate)
SHARDFIELD_PAD(replication_pad3d, kReplicate)
#undef SHARDFIELD_PAD

/// Negative padding crops before the rest wraps round.
Tensor circular_pad(const Tensor& x, SymIntArrayRef sym_pad) {
  auto crop = C10_AS_INTARRAYREF_SLOW(sym_pad).vec();
  std::vector<c10::SymInt> wrap;
  bool crops = false;
  for (int64_t& p : crop) {
    wrap.emplace_back(std::max<int64_t>(p, 0));
    p = std::min<int64_t>(p, 0);
    crops |= p < 0;
  }
  return pad_by_rows<PadMode::kCircular>(
      "_pad_circular", crops ? at::constant_pad_nd(x, crop, 0) : x, wrap,
      [](const Tensor& t, IntArrayRef pad) { return at::_pad_circular(t, pad); });
}

}  // namespace

SHARDFIELD_OPS(pad) {
  table.composed("aten::constant_pad_nd", TORCH_FN(constant_pad));
  table.composed("aten::reflection_pad1d", TORCH_FN(reflection_pad1d_sharded));
  table.composed("aten::reflection_pad2d", TORCH_FN(reflection_pad2d_sharded));
  table.composed("aten::reflection_pad3d", TORCH_FN(reflection_pad3d_sharded));
  table.composed("aten::replication_pad1d", TORCH_FN(replication_pad1d_sharded));
  table.composed("aten::replication_pad2d", TORCH_FN(replication_pad2d_sharded));
  table.composed("aten::replication_pad3d", TORCH_FN(replication_pad3d_sharded));
  table.composed("aten::_pad_circular", TORCH_FN(circular_pad));
}

}  // namespace shardfield::ops
