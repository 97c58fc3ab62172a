// Places of nonzero elements, and writing a list to the places of a mask. Both go by the elements'
// row-major order, in which rows of dim 0 come one after the other: the cut is moved to dim 0, and
// each rank then holds a run of the result.

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/index.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

/// x's cuts gathered on dim 0, in plain blocks.
const Layout* cut_on_rows(const Tensor& x) {
  return cut_on_first(x, 0, x.dim());
}

/// `layout`, cut on rows, with as many rows per piece as each rank says. Collective.
const Layout* with_counts(const Layout& layout, int64_t mine, c10::Device device) {
  Cut rows = layout.cuts()[0];
  rows.sizes = selected_counts(layout, 0, mine, device);
  return spec::intern_layout(layout.mesh(), {std::move(rows)});
}

/// (number of nonzeros, dims), cut as the nonzeros are found.
Tensor nonzero_places(const Tensor& x) {
  const at::NoGradGuard no_grad;
  const Tensor is_set = with_simple_cuts(x.ne(0));
  const Layout* by_rows = cut_on_rows(is_set);
  Tensor places = at::nonzero(tensor::piece_of(tensor::redistribute(is_set, by_rows)));
  places.select(1, 0).add_(by_rows->local_offset(0));
  const Layout* found = with_counts(*by_rows, places.size(0), x.device());
  return tensor::make_sharded(places, found, {found->cuts()[0].total(), x.dim()});
}

std::vector<Tensor> nonzero_numpy(const Tensor& x) {
  return nonzero_places(x).unbind(1);
}

Tensor nonzero_static(const Tensor& x, c10::SymInt sym_size, int64_t fill_value) {
  const int64_t size = sym_size.expect_int();
  SHARDFIELD_CHECK(size >= 0, "nonzero_static", "expected a size of at least 0, got ", size);
  const Tensor places = nonzero_places(x);
  const int64_t found = places.size(0);
  if (size <= found) return places.narrow(0, 0, size);
  return at::constant_pad_nd(places, {0, 0, 0, size - found}, fill_value);
}

/// The elements of `source`, in order, at the places where the mask is true.
Tensor masked_scatter_sharded(const Tensor& self, const Tensor& mask_arg,
                              const Tensor& source_arg) {
  SHARDFIELD_CHECK(mask_arg.scalar_type() == at::kBool, "masked_scatter",
                   "expected a bool mask, got ", mask_arg.scalar_type());
  SHARDFIELD_CHECK(self.scalar_type() == source_arg.scalar_type(), "masked_scatter",
                   "expected self and source to have same dtypes but got ", self.scalar_type(),
                   " and ", source_arg.scalar_type());
  const auto sizes = at::infer_size(self.sizes(), mask_arg.sizes());
  const Tensor x = self.sizes() == at::IntArrayRef(sizes) ? self : self.expand(sizes);
  const Tensor mask =
      mask_arg.sizes() == at::IntArrayRef(sizes) ? mask_arg : mask_arg.expand(sizes);
  if (is_sharded(source_arg))
    dispatch::report_fallback("aten::masked_scatter (source)", source_arg);
  const Tensor source = tensor::gather(source_arg).reshape(-1);
  const Tensor example = with_simple_cuts(is_sharded(x) ? x : mask);
  if (!is_sharded(example)) return at::masked_scatter(x, mask, source);
  const Layout* by_rows = cut_on_rows(example);
  const Tensor own_mask = tensor::local(tensor::redistribute(mask, by_rows));
  const int64_t count = own_mask.sum().item<int64_t>();
  const Layout* taken = with_counts(*by_rows, count, example.device());
  const int64_t total = taken->cuts()[0].total(), begin = taken->local_offset(0);
  SHARDFIELD_CHECK(total <= source.numel(), "masked_scatter", "expected a source of at least ",
                   total, " elements (those the mask selects), got ", source.numel());
  const Tensor piece = at::masked_scatter(tensor::local(tensor::redistribute(x, by_rows)), own_mask,
                                          tensor::enter(source, *by_rows).narrow(0, begin, count));
  return tensor::redistribute(tensor::wrap(piece, by_rows, sizes), &layout_of(example));
}

Tensor& masked_scatter_(Tensor& self, const Tensor& mask, const Tensor& source) {
  return self.copy_(masked_scatter_sharded(self, mask, source));
}

}  // namespace

SHARDFIELD_OPS(nonzero) {
  table.composed("aten::nonzero", TORCH_FN(nonzero_places));
  table.composed("aten::nonzero_numpy", TORCH_FN(nonzero_numpy));
  table.composed("aten::nonzero_static", TORCH_FN(nonzero_static));
  table.composed("aten::masked_scatter", TORCH_FN(masked_scatter_sharded));
  table.composed("aten::masked_scatter_", TORCH_FN(masked_scatter_));
}

}  // namespace shardfield::ops
