// Writing by index: x[idx] = v, x[mask] = v. Every rank writes those positions that it owns;
// nothing moves but sharded values that must be known everywhere.

#include <numeric>

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/formula.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/index.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using OptionalList = c10::List<std::optional<Tensor>>;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

OptionalList as_list(const IndexList& indices) {
  OptionalList list;
  for (const Tensor& t : indices)
    list.push_back(t.defined() ? std::optional<Tensor>(t) : std::nullopt);
  return list;
}

IndexList as_tensors(const OptionalList& list) {
  IndexList out;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::optional<Tensor> t = list.get(i);
    out.push_back(t.value_or(Tensor()));
  }
  return out;
}

/// Plain in, plain gradient out, although what it meets is sharded.
struct StayPlainFn : Function<StayPlainFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& plain) {
    comm::remember_scope(ctx);
    return plain.detach();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    return {tensor::gather(grads[0])};
  }
};

/// A single mask over leading dims [first, first + mask.dim()) with one value per kept dim: every
/// rank masks its own piece.
bool put_by_mask(const Tensor& self, const IndexList& indices, const Tensor& values,
                 bool accumulate) {
  if (indices.empty()) return false;
  const auto first = static_cast<int64_t>(indices.size()) - 1;
  const Tensor& mask = indices.back();
  for (int64_t d = 0; d < first; ++d)
    if (indices[d].defined()) return false;
  const bool is_mask = mask.scalar_type() == at::kBool || mask.scalar_type() == at::kByte;
  if (!is_mask || mask.dim() == 0 || values.numel() != 1 || first + mask.dim() > self.dim())
    return false;
  if (self.sizes().slice(first, mask.dim()) != mask.sizes()) return false;
  const Layout& layout = layout_of(self);
  if (!layout.is_simple(self.sizes().data())) return false;
  std::vector<int> dims(self.dim(), -1);
  for (int64_t d = 0; d < mask.dim(); ++d) dims[first + d] = static_cast<int>(d);
  const Layout* of_mask = spec::renumber(layout, dims);
  IndexList own(first);
  own.push_back(of_mask ? tensor::piece_for(mask, *of_mask, mask.sizes()) : tensor::gather(mask));
  Tensor piece = tensor::piece_of(self);
  const Tensor value = tensor::gather(values).reshape({});
  at::index_put_(piece, as_list(own), value, accumulate);
  return true;
}

/// Values of shape `shape.sizes` as rows [positions][kept dims of x, this rank's part].
Tensor rows_of_values(const Tensor& values, const IndexShape& shape, const Layout& layout,
                      int64_t positions) {
  Tensor full = tensor::gather(values).expand(shape.sizes);
  std::vector<int64_t> order(shape.index_dims);
  std::iota(order.begin(), order.end(), shape.start);
  for (int64_t d = 0; d < full.dim(); ++d)
    if (d < shape.start || d >= shape.start + shape.index_dims) order.push_back(d);
  full = full.permute(order);
  std::vector<int64_t> sizes = full.sizes().slice(shape.index_dims).vec();
  sizes.insert(sizes.begin(), positions);
  full = full.reshape(sizes);
  for (size_t c = 0; c < layout.cuts().size(); ++c) {
    const int dim = layout.cuts()[c].dim;
    if (shape.new_dim[dim] < 0) continue;
    int64_t place = 1;
    for (int d = 0; d < dim; ++d) place += shape.new_dim[d] >= 0;
    full = full.narrow(place, layout.local_offset(c), layout.local_size(c));
  }
  return full;
}

/// Integer positions: those in this rank's piece are written.
void put_own_positions(const Tensor& self, const IndexList& indices, const Tensor& values,
                       bool accumulate) {
  const Layout& layout = layout_of(self);
  const IndexShape shape(self.sizes(), indices);
  const int64_t positions = c10::multiply_integers(shape.index_sizes);
  Tensor own = at::ones({positions}, self.options().dtype(at::kBool));
  std::vector<Tensor> rows;
  std::vector<int64_t> order, kept;
  for (int64_t d = 0; d < self.dim(); ++d) {
    const bool indexed = shape.new_dim[d] < 0;
    (indexed ? order : kept).push_back(d);
    if (!indexed) continue;
    const int64_t n = self.size(d);
    Tensor row = indices[d].to(self.device()).expand(shape.index_sizes).reshape(-1);
    TORCH_CHECK_INDEX(positions == 0 || (row.ge(-n) & row.lt(n)).all().item<bool>(),
                      "index_put_: an index is out of bounds for dim ", d, " of size ", n);
    row = at::where(row.lt(0), row + n, row);
    const int c = layout.cut_on(static_cast<int>(d));
    if (c >= 0) {
      row = row - layout.local_offset(c);
      own = own & row.ge(0) & row.lt(layout.local_size(c));
    }
    rows.push_back(row);
  }
  order.insert(order.end(), kept.begin(), kept.end());
  const Tensor sources = rows_of_values(values, shape, layout, positions);
  const Tensor chosen = own.nonzero().squeeze(1);
  for (Tensor& row : rows) row = row.index_select(0, chosen);
  Tensor target = tensor::piece_of(self).permute(order);
  at::index_put_(target, as_list(rows), sources.index_select(0, chosen), accumulate);
}

void put_through_gather(Tensor& self, const OptionalList& list, const Tensor& values,
                        bool accumulate) {
  dispatch::report_fallback("aten::index_put_", self);
  IndexList plain;
  for (const Tensor& t : as_tensors(list)) plain.push_back(t.defined() ? tensor::gather(t) : t);
  Tensor full = tensor::gather(self).clone();
  at::index_put_(full, as_list(plain), tensor::gather(values), accumulate);
  self.copy_(tensor::scatter_like(full, &layout_of(self)));
}

Tensor& index_put_kernel(Tensor& self, const OptionalList& list, const Tensor& values,
                         bool accumulate) {
  const IndexList indices = as_tensors(list);
  if (!is_sharded(self)) {
    IndexList plain;
    for (const Tensor& t : indices) plain.push_back(t.defined() ? tensor::gather(t) : t);
    return at::index_put_(self, as_list(plain), tensor::gather(values), accumulate);
  }
  tensor::check_writable(self, "index_put_");
  if (put_by_mask(self, indices, values, accumulate)) return self;
  if (!layout_of(self).is_simple(self.sizes().data())) {
    put_through_gather(self, list, values, accumulate);
    return self;
  }
  put_own_positions(self, plain_indices(self, indices), values, accumulate);
  return self;
}

Tensor& index_put_impl_kernel(Tensor& self, const OptionalList& list, const Tensor& values,
                              bool accumulate, bool /*unsafe*/) {
  return index_put_kernel(self, list, values, accumulate);
}

Tensor& index_put_above(c10::DispatchKeySet keys, Tensor& self, const OptionalList& list,
                        const Tensor& values, bool accumulate) {
  const Tensor given =
      !is_sharded(values) && comm::records_grad(values) ? StayPlainFn::apply(values) : values;
  if (!is_sharded(self)) {
    const OptionalList plain = [&] {
      IndexList out;
      for (const Tensor& t : as_tensors(list)) out.push_back(t.defined() ? tensor::gather(t) : t);
      return as_list(out);
    }();
    return at::index_put_(self, plain, tensor::gather(values), accumulate);
  }
  const auto keep = dispatch::prepare_leaf(self);
  const auto keep_values = is_sharded(given) ? dispatch::prepare_leaf(given) : nullptr;
  return at::_ops::index_put_::redispatch(dispatch::formula_keys(keys), self, list, given,
                                          accumulate);
}

Tensor index_put_copy(const Tensor& self, const OptionalList& list, const Tensor& values,
                      bool accumulate) {
  Tensor out = self.clone();
  return at::index_put_(out, list, values, accumulate);
}

/// Writes by row-major number.
Tensor put_elements(const Tensor& self, const Tensor& index, const Tensor& source,
                    bool accumulate) {
  return at::index_put(self.reshape(-1), {index.reshape(-1)}, source.reshape(-1), accumulate)
      .view(self.sizes());
}
Tensor& put_(Tensor& self, const Tensor& index, const Tensor& source, bool accumulate) {
  return self.copy_(put_elements(self, index, source, accumulate));
}

// masked_fill_: every rank fills its own piece.

Tensor& masked_fill_scalar_kernel(Tensor& self, const Tensor& mask, const at::Scalar& value) {
  if (!is_sharded(self)) return self.masked_fill_(tensor::gather(mask), value);
  tensor::check_writable(self, "masked_fill_");
  Tensor piece = tensor::piece_of(self);
  piece.masked_fill_(tensor::piece_for(mask, layout_of(self), self.sizes()), value);
  return self;
}
Tensor& masked_fill_tensor_kernel(Tensor& self, const Tensor& mask, const Tensor& value) {
  if (!is_sharded(self)) return self.masked_fill_(tensor::gather(mask), tensor::gather(value));
  tensor::check_writable(self, "masked_fill_");
  Tensor piece = tensor::piece_of(self);
  piece.masked_fill_(tensor::piece_for(mask, layout_of(self), self.sizes()), tensor::gather(value));
  return self;
}

}  // namespace

SHARDFIELD_OPS(index_put) {
  table.elementwise("aten::masked_fill_.Scalar", TORCH_FN(masked_fill_scalar_kernel));
  table.elementwise("aten::masked_fill_.Tensor", TORCH_FN(masked_fill_tensor_kernel));
  table.composed("aten::put", TORCH_FN(put_elements));
  table.composed("aten::put_", TORCH_FN(put_));
  table.above_autograd("aten::index_put_", TORCH_FN(index_put_above));
  table.backend("aten::index_put_", TORCH_FN(index_put_kernel));
  table.backend("aten::_index_put_impl_", TORCH_FN(index_put_impl_kernel));
  table.composed("aten::index_put", TORCH_FN(index_put_copy));
  table.composed("aten::_unsafe_index_put", TORCH_FN(index_put_copy));
}

}  // namespace shardfield::ops
