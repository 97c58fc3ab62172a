// Softmax, log-softmax and logsumexp. Uncut dim: PyTorch's kernel on the piece. Cut dim: the
// maximum, then the sum of exponentials over the ranks; backward one sum. PyTorch's derivative
// formulas sit above.

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/moments.h"
#include "shardfield/ops/reduced_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using tensor::make_sharded;
using tensor::piece_of;

bool is_cut(const Tensor& x, int64_t dim) {
  for (const spec::Cut& cut : layout_of(x).cuts())
    if (cut.dim == dim) return true;
  return false;
}

std::vector<int> axes_of(const Tensor& x, int64_t dim) {
  return axes_across(layout_of(x), [&](int d) { return d == dim; });
}

Tensor as_input(Tensor piece, const Tensor& x) {
  return make_sharded(std::move(piece), &layout_of(x), x.sizes());
}

struct LogTotal {
  Tensor shift;  ///< largest value along the dims, 0 where it is infinite
  Tensor total;  ///< sum of exp(x - shift)
};

/// Both over the piece's dims and over the ranks on `axes`, keeping the dims. Collective.
LogTotal log_total(const Tensor& piece, at::IntArrayRef dims, const spec::Mesh& mesh,
                   const std::vector<int>& axes) {
  auto sizes = piece.sizes().vec();
  bool empty = false;
  for (int64_t d : dims) {
    empty |= sizes[d] == 0;
    sizes[d] = 1;
  }
  const double lowest = -std::numeric_limits<double>::infinity();
  Tensor shift = empty ? at::full(sizes, lowest, piece.options()) : at::amax(piece, dims, true);
  if (!axes.empty()) shift = comm::all_reduce(shift, mesh, axes, comm::Reduction::kMax);
  shift = shift.masked_fill(shift.abs() == std::numeric_limits<double>::infinity(), 0);
  Tensor total = at::sum(at::exp(piece - shift), dims, true);
  if (!axes.empty()) total = comm::all_reduce(total, mesh, axes);
  return {shift, total};
}

/// Softmax over a cut dim. A row that holds +inf gives NaN as in PyTorch, and so does one that is
/// -inf everywhere unless `safe`: then it gives 0.
Tensor split_softmax(const Tensor& x, int64_t dim, bool log, bool safe = false) {
  const Tensor piece = piece_of(x).to(accumulate_type(x.scalar_type()));
  auto sizes = piece.sizes().vec();
  const bool empty = sizes[dim] == 0;
  sizes[dim] = 1;
  const double lowest = -std::numeric_limits<double>::infinity();
  Tensor top = empty ? at::full(sizes, lowest, piece.options()) : at::amax(piece, {dim}, true);
  const auto& mesh = layout_of(x).mesh();
  top = comm::all_reduce(top, mesh, axes_of(x, dim), comm::Reduction::kMax);
  const Tensor shifted = piece - top;
  const Tensor exponential = at::exp(shifted);
  const Tensor total = comm::all_reduce(at::sum(exponential, {dim}, true), mesh, axes_of(x, dim));
  Tensor y = log ? shifted - total.log() : exponential / total;
  if (safe) y = y.masked_fill(top == lowest, 0);
  return as_input(y.to(x.scalar_type()), x);
}

template <bool log>
Tensor softmax(const Tensor& input, int64_t dim, bool half_to_float) {
  const Tensor x = half_to_float ? input.to(at::kFloat) : input;
  dim = at::maybe_wrap_dim(dim, x.dim());
  if (is_cut(x, dim)) return split_softmax(x, dim, log);
  return as_input(
      log ? at::_log_softmax(piece_of(x), dim, false) : at::_softmax(piece_of(x), dim, false), x);
}

/// Attention's softmax: a row of -inf, whose keys are all masked, gives zeros.
Tensor safe_softmax(const Tensor& input, int64_t dim, std::optional<at::ScalarType> dtype) {
  const Tensor x = dtype ? input.to(*dtype) : input;
  dim = at::maybe_wrap_dim(dim, x.dim());
  if (is_cut(x, dim)) return split_softmax(x, dim, false, true);
  return as_input(at::_safe_softmax(piece_of(x), dim), x);
}

template <bool log>
Tensor softmax_backward(const Tensor& grad, const Tensor& y, int64_t dim,
                        at::ScalarType input_type) {
  if (!is_sharded(y)) {
    return log ? at::_log_softmax_backward_data(tensor::gather(grad), y, dim, input_type)
               : at::_softmax_backward_data(tensor::gather(grad), y, dim, input_type);
  }
  const Tensor g = tensor::piece_for(grad, layout_of(y), y.sizes());
  dim = at::maybe_wrap_dim(dim, y.dim());
  if (!is_cut(y, dim)) {
    return as_input(log ? at::_log_softmax_backward_data(g, piece_of(y), dim, input_type)
                        : at::_softmax_backward_data(g, piece_of(y), dim, input_type),
                    y);
  }
  const auto type = accumulate_type(y.scalar_type());
  const Tensor wide = g.to(type), result = piece_of(y).to(type);
  const Tensor product = log ? wide : wide * result;
  const Tensor sum =
      comm::all_reduce(at::sum(product, {dim}, true), layout_of(y).mesh(), axes_of(y, dim));
  const Tensor dx = log ? wide - at::exp(result) * sum : product - result * sum;
  return as_input(dx.to(input_type), y);
}

Tensor logsumexp(const Tensor& x, at::IntArrayRef dims, bool keepdim) {
  const ReducedDims r(x, dims, keepdim);
  const Tensor piece =
      at::isIntegralType(x.scalar_type(), true) ? piece_of(x).to(at::kFloat) : piece_of(x);
  if (!r.crosses_ranks()) {
    return tensor::wrap(at::logsumexp(piece, r.dims, keepdim), r.layout, r.sizes);
  }
  auto [shift, total] = log_total(piece.to(accumulate_type(piece.scalar_type())), r.dims,
                                  layout_of(x).mesh(), r.axes);
  Tensor y = (total.log() + shift).to(piece.scalar_type());
  if (!keepdim) y = y.squeeze(r.dims);
  return tensor::wrap(y, r.layout, r.sizes);
}

}  // namespace

SHARDFIELD_OPS(softmax) {
  table.backend("aten::_softmax", TORCH_FN(softmax<false>));
  table.backend("aten::_log_softmax", TORCH_FN(softmax<true>));
  table.backend("aten::_safe_softmax", TORCH_FN(safe_softmax));
  table.backend("aten::_softmax_backward_data", TORCH_FN(softmax_backward<false>));
  table.backend("aten::_log_softmax_backward_data", TORCH_FN(softmax_backward<true>));
  table.backend("aten::logsumexp", TORCH_FN(logsumexp));
}

}  // namespace shardfield::ops
