// The copying forms of views (slice_scatter, unsafe_split): the view, then a copy. The rule for the
// `*_copy` ops is dispatch::copy_of_view.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;

Tensor slice_scatter(const Tensor& x, const Tensor& source, int64_t dim,
                     std::optional<c10::SymInt> start, std::optional<c10::SymInt> end,
                     c10::SymInt step) {
  Tensor out = x.clone();
  Tensor part = at::slice_symint(out, dim, start, end, step);
  TORCH_CHECK(part.sizes() == source.sizes(),
              "expected src to have a size equal to the slice of self. src size = ", source.sizes(),
              ", slice size = ", part.sizes());
  part.copy_(source);
  return out;
}

Tensor select_scatter(const Tensor& x, const Tensor& source, int64_t dim, c10::SymInt index) {
  Tensor out = x.clone();
  // A row of a cut dim may be plain; a slice of one row is the tensor's own memory.
  const int64_t i = index.expect_int(), n = x.size(dim);
  const Tensor row = at::select_symint(x, dim, index);
  TORCH_CHECK(row.sizes() == source.sizes(),
              "expected src to have a size equal to the slice of self. src size = ", source.sizes(),
              ", slice size = ", row.sizes());
  const int64_t begin = i < 0 ? i + n : i;
  at::slice(out, dim, begin, begin + 1).copy_(source.unsqueeze(dim < 0 ? dim + x.dim() : dim));
  return out;
}

/// Not views: each can be written to without the others' knowledge, as torch's recurrent cells do.
std::vector<Tensor> copied(std::vector<Tensor> views) {
  for (Tensor& view : views) view = view.clone();
  return views;
}
std::vector<Tensor> unsafe_split(const Tensor& x, c10::SymInt size, int64_t dim) {
  return copied(at::split_symint(x, size, dim));
}
std::vector<Tensor> unsafe_split_with_sizes(const Tensor& x, c10::SymIntArrayRef sizes,
                                            int64_t dim) {
  return copied(at::split_with_sizes_symint(x, sizes, dim));
}

bool all_close(const Tensor& a, const Tensor& b, double rtol, double atol, bool equal_nan) {
  return at::isclose(a, b, rtol, atol, equal_nan).all().item<bool>();
}

}  // namespace

SHARDFIELD_OPS(view_copy) {
  table.composed("aten::slice_scatter", TORCH_FN(slice_scatter));
  table.composed("aten::select_scatter", TORCH_FN(select_scatter));
  table.composed("aten::unsafe_split.Tensor", TORCH_FN(unsafe_split));
  table.composed("aten::unsafe_split_with_sizes", TORCH_FN(unsafe_split_with_sizes));
  table.composed("aten::allclose", TORCH_FN(all_close));
}

}  // namespace shardfield::ops
