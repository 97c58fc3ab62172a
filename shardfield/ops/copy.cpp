// Allocation, copies and conversions.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/spec/listed_rows.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using tensor::impl_of;
using tensor::is_sharded;
using tensor::layout_of;
using tensor::make_sharded_strided;
using tensor::piece_of;

/// Outer strides of an empty_like/clone result: the input's where dense and preserving.
c10::SmallVector<int64_t, 5> like_strides(const Tensor& x, std::optional<at::MemoryFormat> format) {
  const auto wanted = format.value_or(at::MemoryFormat::Preserve);
  if (wanted != at::MemoryFormat::Preserve) return tensor::dense_strides(x.sizes(), wanted);
  if (x.is_non_overlapping_and_dense()) return {x.strides().begin(), x.strides().end()};
  return tensor::dense_strides(x.sizes(), x.suggest_memory_format());
}

Tensor empty_like(const Tensor& x, std::optional<at::ScalarType> dtype,
                  std::optional<at::Layout> layout, std::optional<at::Device> device,
                  std::optional<bool> pin, std::optional<at::MemoryFormat> format) {
  return make_sharded_strided(at::empty_like(piece_of(x), dtype, layout, device, pin, format),
                              &layout_of(x), x.sizes(), like_strides(x, format));
}

Tensor clone(const Tensor& x, std::optional<at::MemoryFormat> format) {
  return make_sharded_strided(at::clone(piece_of(x), format), &layout_of(x), x.sizes(),
                              like_strides(x, format));
}

Tensor to_copy(const Tensor& x, std::optional<at::ScalarType> dtype,
               std::optional<at::Layout> layout, std::optional<at::Device> device,
               std::optional<bool> pin, bool non_blocking, std::optional<at::MemoryFormat> format) {
  return make_sharded_strided(
      at::_to_copy(piece_of(x), dtype, layout, device, pin, non_blocking, format), &layout_of(x),
      x.sizes(), like_strides(x, format));
}

/// The layout of a new tensor for which x stands as an example. Sizes equal to x's own mean "one
/// like this", as many rows mean "one per row", and as many rows as x's rows name "one per named
/// row" (nodes that edges name). Each would be global memory on every rank if it were plain.
const spec::Layout* layout_of_new(const Tensor& x, at::IntArrayRef sizes) {
  if (sizes == x.sizes()) return &layout_of(x);
  if (sizes.empty() || x.dim() == 0 || !layout_of(x).is_simple(x.sizes().data())) return nullptr;
  std::vector<int> rows(x.dim(), -1);
  rows[0] = 0;
  const spec::Layout* by_rows = spec::renumber(layout_of(x), rows);
  if (!by_rows || sizes[0] == x.size(0)) return by_rows;
  return spec::listed_rows(by_rows, sizes[0]);
}

Tensor new_empty(const Tensor& x, c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype,
                 std::optional<at::Layout> layout, std::optional<at::Device> device,
                 std::optional<bool> pin) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const at::Tensor& piece = piece_of(x);
  const spec::Layout* cut = layout_of_new(x, sizes);
  if (!cut) return piece.new_empty(sizes, dtype, layout, device, pin);
  return tensor::make_sharded(
      piece.new_empty(tensor::piece_sizes(*cut, sizes), dtype, layout, device, pin), cut, sizes);
}

Tensor new_empty_strided(const Tensor& x, c10::SymIntArrayRef size, c10::SymIntArrayRef stride,
                         std::optional<at::ScalarType> dtype, std::optional<at::Layout> layout,
                         std::optional<at::Device> device, std::optional<bool> pin) {
  const auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  const auto strides = C10_AS_INTARRAYREF_SLOW(stride);
  const at::Tensor& piece = piece_of(x);
  if (sizes != x.sizes())
    return piece.new_empty_strided(sizes, strides, dtype, layout, device, pin);
  // The piece keeps the memory order of the outer strides.
  std::vector<int64_t> order(sizes.size()), local(sizes.size());
  for (size_t d = 0; d < order.size(); ++d) order[d] = static_cast<int64_t>(d);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return strides[a] > strides[b]; });
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    local[order[i]] = step;
    step *= std::max<int64_t>(piece.size(order[i]), 1);
  }
  return make_sharded_strided(
      piece.new_empty_strided(piece.sizes(), local, dtype, layout, device, pin), &layout_of(x),
      sizes, strides);
}

Tensor& copy_(Tensor& self, const Tensor& source, bool non_blocking) {
  if (!is_sharded(self)) return self.copy_(tensor::gather(source), non_blocking);
  tensor::check_writable(self, "copy_");
  Tensor piece = piece_of(self);
  piece.copy_(tensor::piece_for(source, layout_of(self), self.sizes()), non_blocking);
  return self;
}

Tensor& fill_scalar(Tensor& self, const at::Scalar& value) {
  tensor::check_writable(self, "fill_");
  Tensor(piece_of(self)).fill_(value);
  return self;
}
Tensor& fill_tensor(Tensor& self, const Tensor& value) {
  if (!is_sharded(self)) return self.fill_(tensor::gather(value));
  tensor::check_writable(self, "fill_");
  Tensor(piece_of(self)).fill_(tensor::gather(value));
  return self;
}
Tensor& zero_(Tensor& self) {
  tensor::check_writable(self, "zero_");
  Tensor(piece_of(self)).zero_();
  return self;
}

bool same_storage_numel(const Tensor& a, const Tensor& b) {
  return is_sharded(a) == is_sharded(b);
}
Tensor zeros_with_feature_meta(const Tensor& self, const Tensor& other, int64_t) {
  if (is_sharded(self) && is_sharded(other) && self.sizes() == other.sizes())
    return at::zeros_like(self);
  if (is_sharded(other)) return at::zeros_like(other);
  return at::zeros(other.sizes(), other.options());
}

[[noreturn]] void refuse(const char* op) {
  SHARDFIELD_CHECK(false, op,
                   "a sharded tensor cannot take other storage or sizes; make a new one with "
                   "shard_tensor or from_local");
}
const Tensor& resize_(const Tensor&, c10::SymIntArrayRef, std::optional<at::MemoryFormat>) {
  refuse("resize_");
}
const Tensor& resize_as_(const Tensor&, const Tensor&, std::optional<at::MemoryFormat>) {
  refuse("resize_as_");
}
Tensor& set_storage(Tensor&, at::Storage) {
  refuse("set_");
}
Tensor& set_tensor(Tensor&, const Tensor&) {
  refuse("set_");
}

}  // namespace

SHARDFIELD_OPS(copy) {
  table.backend("aten::empty_like", TORCH_FN(empty_like));
  table.backend("aten::clone", TORCH_FN(clone));
  table.backend("aten::_to_copy", TORCH_FN(to_copy));
  table.backend("aten::new_empty", TORCH_FN(new_empty));
  table.backend("aten::new_empty_strided", TORCH_FN(new_empty_strided));
  table.elementwise("aten::copy_", TORCH_FN(copy_));
  table.backend("aten::fill_.Scalar", TORCH_FN(fill_scalar));
  table.backend("aten::fill_.Tensor", TORCH_FN(fill_tensor));
  table.backend("aten::zero_", TORCH_FN(zero_));
  table.backend("aten::_has_same_storage_numel", TORCH_FN(same_storage_numel));
  table.backend("aten::_new_zeros_with_same_feature_meta", TORCH_FN(zeros_with_feature_meta));
  table.backend("aten::resize_", TORCH_FN(resize_));
  table.backend("aten::resize_as_", TORCH_FN(resize_as_));
  table.backend("aten::set_.source_Storage", TORCH_FN(set_storage));
  table.backend("aten::set_.source_Tensor", TORCH_FN(set_tensor));
}

}  // namespace shardfield::ops
