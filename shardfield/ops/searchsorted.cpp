// Looking up values in sorted sequences: searchsorted, bucketize. A cut of the values stays where
// it is. Along a cut sequence every rank counts how many of its own elements come before a value;
// the place in the whole sequence is the sum.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/boxed.h"
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
using MaybeTensor = std::optional<Tensor>;
using MaybeSide = std::optional<c10::string_view>;

/// The layout of the values (and the result): cuts of the sequence on the leading dims that both
/// have, and of the values' other cuts those on axes that the sequence is not cut along.
const Layout* result_layout(const Tensor& sequence, const Tensor& values) {
  const Layout* of_values = is_sharded(values) ? &layout_of(values) : nullptr;
  if (!is_sharded(sequence)) return of_values;
  const Layout& of_sequence = layout_of(sequence);
  const auto last = static_cast<int>(sequence.dim() - 1);
  std::vector<Cut> cuts;
  if (sequence.dim() > 1)
    for (const Cut& cut : of_sequence.cuts())
      if (cut.dim < last) cuts.push_back(cut);
  if (of_values) {
    for (const Cut& cut : of_values->cuts()) {
      const bool is_free = std::ranges::none_of(
          cut.axes, [&](int a) { return std::ranges::binary_search(of_sequence.axes(), a); });
      if (is_free && (sequence.dim() == 1 || cut.dim == last)) cuts.push_back(cut);
    }
  }
  return spec::intern_layout(of_sequence.mesh(), std::move(cuts));
}

/// This rank's part of the sequence: its own elements, or for its own values' leading dims.
Tensor own_sequence(const Tensor& sequence, const Tensor& values, const Layout* layout) {
  if (is_sharded(sequence)) return tensor::piece_of(sequence);
  if (!layout || sequence.dim() == 1) return sequence;
  std::vector<int> leading(values.dim());
  for (int d = 0; d < values.dim(); ++d) leading[d] = d + 1 < values.dim() ? d : -1;
  const Layout* cut = spec::renumber(*layout, leading);
  return cut ? tensor::piece_for(sequence, *cut, sequence.sizes()) : sequence;
}

Tensor searchsorted_tensor(const Tensor& sequence_arg, const Tensor& values_arg, bool out_int32,
                           bool right, MaybeSide side, const MaybeTensor& sorter) {
  const at::NoGradGuard no_grad;
  SHARDFIELD_CHECK(!side || *side == "left" || *side == "right", "searchsorted",
                   "side can only be 'left' or 'right' but got '", side.value_or(""), "'");
  SHARDFIELD_CHECK(!side || !right || *side == "right", "searchsorted",
                   "side and right can't be set to opposites, got side of left while right was "
                   "True");
  Tensor sequence = with_simple_cuts(sequence_arg);
  if (sorter.has_value() && sorter->defined()) sequence = at::gather(sequence, -1, *sorter);
  const Tensor values = with_simple_cuts(values_arg);
  const int64_t leading = sequence.dim() - 1;
  SHARDFIELD_CHECK(
      leading == 0 || (values.dim() == sequence.dim() &&
                       values.sizes().slice(0, leading) == sequence.sizes().slice(0, leading)),
      "searchsorted",
      "boundaries tensor should be 1 dimension or the first N-1 dimensions of "
      "boundaries tensor and input value tensor must match, but we got boundaries "
      "tensor ",
      sequence.sizes(), " and input value tensor ", values.sizes());
  const Layout* layout = result_layout(sequence, values);
  const Tensor own = own_sequence(sequence, values, layout);
  const Tensor moved = tensor::redistribute(values, layout);
  const Tensor own_values = layout ? tensor::piece_of(moved) : moved;
  Tensor places =
      at::searchsorted(own.contiguous(), own_values.contiguous(), out_int32, right, side);
  if (is_sharded(sequence))
    if (const int c = layout_of(sequence).cut_on(static_cast<int>(leading)); c >= 0)
      places =
          comm::all_reduce(places, layout_of(sequence).mesh(), layout_of(sequence).cuts()[c].axes);
  return tensor::wrap(places, layout, values.sizes());
}

Tensor searchsorted_scalar(const Tensor& sequence, const at::Scalar& value, bool out_int32,
                           bool right, MaybeSide side, const MaybeTensor& sorter) {
  const Tensor values = at::scalar_tensor(value, tensor::piece_of(sequence).options());
  return searchsorted_tensor(sequence, values, out_int32, right, side, sorter);
}

Tensor bucketize_tensor(const Tensor& values, const Tensor& boundaries, bool out_int32,
                        bool right) {
  SHARDFIELD_CHECK(boundaries.dim() == 1, "bucketize",
                   "boundaries tensor must be 1 dimension, "
                   "but got sizes ",
                   boundaries.sizes());
  return searchsorted_tensor(boundaries, values, out_int32, right, std::nullopt, std::nullopt);
}

Tensor bucketize_scalar(const at::Scalar& value, const Tensor& boundaries, bool out_int32,
                        bool right) {
  return searchsorted_scalar(boundaries, value, out_int32, right, std::nullopt, std::nullopt);
}

}  // namespace

SHARDFIELD_OPS(searchsorted) {
  table.composed("aten::searchsorted.Tensor", TORCH_FN(searchsorted_tensor));
  table.composed("aten::searchsorted.Scalar", TORCH_FN(searchsorted_scalar));
  table.composed("aten::bucketize.Tensor", TORCH_FN(bucketize_tensor));
  table.composed("aten::bucketize.Scalar", TORCH_FN(bucketize_scalar));
}

}  // namespace shardfield::ops
