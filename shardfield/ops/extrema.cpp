// Maxima and minima: values are all-reduced, positions are global and the first of equal values
// wins, as on one device. Gradients stay where the winners are; where one device shares a gradient
// among equal values, it is shared over all ranks.

#include <limits>

#include <ATen/ATen.h>
#include <ATen/WrapDimUtils.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/backward_scope.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/reduced_dims.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::OptionalIntArrayRef;
using at::Tensor;
using comm::Reduction;

constexpr int64_t kNowhere = std::numeric_limits<int64_t>::max();

/// The value that loses against all others.
at::Scalar identity(at::ScalarType type, bool largest) {
  if (type == at::kBool) return !largest;
  if (at::isFloatingType(type)) {
    const double inf = std::numeric_limits<double>::infinity();
    return largest ? -inf : inf;
  }
  at::Scalar out;
  AT_DISPATCH_INTEGRAL_TYPES(type, "extrema", [&] {
    out = static_cast<int64_t>(largest ? std::numeric_limits<scalar_t>::lowest()
                                       : std::numeric_limits<scalar_t>::max());
  });
  return out;
}

bool reduces_nothing(const Tensor& piece, at::IntArrayRef dims) {
  return std::any_of(dims.begin(), dims.end(), [&](int64_t d) { return piece.size(d) == 0; });
}

std::vector<int64_t> reduced_sizes(const Tensor& piece, const ReducedDims& r) {
  std::vector<int64_t> sizes;
  for (int64_t d = 0; d < piece.dim(); ++d) {
    const bool reduced = std::binary_search(r.dims.begin(), r.dims.end(), d);
    if (!reduced || r.keepdim) sizes.push_back(reduced ? 1 : piece.size(d));
  }
  return sizes;
}

/// This rank's extreme values; a rank with nothing to reduce has the identity.
Tensor piece_extreme(const Tensor& piece, const ReducedDims& r, bool largest) {
  if (reduces_nothing(piece, r.dims))
    return at::full(reduced_sizes(piece, r), identity(piece.scalar_type(), largest),
                    piece.options());
  return largest ? at::amax(piece, r.dims, r.keepdim) : at::amin(piece, r.dims, r.keepdim);
}

void check_nonempty(const char* op, const Tensor& x, const ReducedDims& r) {
  for (int64_t d : r.dims)
    SHARDFIELD_CHECK(x.size(d) > 0, op, "cannot reduce dim ", d, " of size 0 in ",
                     tensor::describe(x));
}

Tensor same_value(const Tensor& piece, const Tensor& value) {
  Tensor same = piece.eq(value);
  if (at::isFloatingType(piece.scalar_type())) same = same | (piece.isnan() & value.isnan());
  return same;
}

Tensor extreme(const char* op, const Tensor& x, OptionalIntArrayRef dims, bool keepdim,
               bool largest) {
  const ReducedDims r(x, dims, keepdim);
  check_nonempty(op, x, r);
  if (!r.crosses_ranks()) {
    const Tensor piece = tensor::local(x);
    return r.finish(largest ? at::amax(piece, r.dims, keepdim) : at::amin(piece, r.dims, keepdim));
  }
  const Tensor piece = tensor::local(x);
  const Tensor data = piece.detach();
  const Tensor value =
      r.combine(piece_extreme(data, r, largest), largest ? Reduction::kMax : Reduction::kMin);
  if (!comm::records_grad(piece)) return r.finish(value);
  const Tensor mask = same_value(data, r.keep_dims(value));
  const Tensor ties = r.combine(mask.sum(r.dims, true), Reduction::kSum);
  const Tensor weight = mask.to(data.scalar_type()) / ties;
  return r.finish(r.pick(piece, weight, value));
}

Tensor amax_dims(const Tensor& x, at::IntArrayRef dims, bool keepdim) {
  return extreme("amax", x, dims, keepdim, true);
}
Tensor amin_dims(const Tensor& x, at::IntArrayRef dims, bool keepdim) {
  return extreme("amin", x, dims, keepdim, false);
}
Tensor max_all(const Tensor& x) {
  return extreme("max", x, std::nullopt, false, true);
}
Tensor min_all(const Tensor& x) {
  return extreme("min", x, std::nullopt, false, false);
}
std::tuple<Tensor, Tensor> aminmax_dim(const Tensor& x, std::optional<int64_t> dim, bool keepdim) {
  const auto dims = dim ? std::vector<int64_t>{*dim} : std::vector<int64_t>{};
  return {extreme("aminmax", x, dims, keepdim && dim, false),
          extreme("aminmax", x, dims, keepdim && dim, true)};
}

// With positions.

struct Position {
  Tensor value;  ///< all-reduced, without autograd
  Tensor index;  ///< global index along the dim, equal on the reduced axes
};

/// Where the extreme along one dim is. x must have one simple cut on it.
Position first_extreme(const Tensor& x, const ReducedDims& r, bool largest) {
  const Tensor piece = tensor::piece_of(x);
  const int64_t dim = r.dims[0];
  Tensor value, index;
  if (piece.size(dim) == 0) {
    value = piece_extreme(piece, r, largest);
    index = at::full(value.sizes(), kNowhere, value.options().dtype(at::kLong));
  } else {
    std::tie(value, index) =
        largest ? at::max(piece, dim, r.keepdim) : at::min(piece, dim, r.keepdim);
  }
  const Tensor best = r.combine(value, largest ? Reduction::kMax : Reduction::kMin);
  if (r.crosses_ranks() && piece.size(dim) > 0) {
    const auto c = static_cast<size_t>(r.source->cut_on(static_cast<int>(dim)));
    index = (index + r.source->local_offset(c))
                .masked_fill(same_value(value, best).logical_not(), kNowhere);
  }
  return {best, r.combine(index, Reduction::kMin)};
}

/// constant_pad_nd's pad list for one more row at the end of `dim`.
std::vector<int64_t> pad_one_row(int64_t ndim, int64_t dim) {
  std::vector<int64_t> pad(2 * (ndim - dim), 0);
  pad.back() = 1;
  return pad;
}

/// The values at global positions along one dim, differentiably: the owner reads, the others add 0.
Tensor values_at(const Tensor& x, const ReducedDims& r, const Tensor& index) {
  const Tensor piece = tensor::local(x);
  const int64_t dim = r.dims[0];
  const auto c = static_cast<size_t>(r.source->cut_on(static_cast<int>(dim)));
  const Tensor row = r.keep_dims(index) - r.source->local_offset(c);
  const Tensor mine = row.ge(0) & row.lt(piece.size(dim));
  const Tensor padded =
      piece.size(dim) > 0 ? piece : at::constant_pad_nd(piece, pad_one_row(piece.dim(), dim));
  Tensor value = at::gather(padded, dim, row.masked_fill(mine.logical_not(), 0))
                     .masked_fill(mine.logical_not(), 0);
  if (!r.keepdim) value = value.squeeze(dim);
  return tensor::reduce_sum(value, r.source->mesh(), r.axes);
}

std::tuple<Tensor, Tensor> extreme_dim(const char* op, const Tensor& input, int64_t dim,
                                       bool keepdim, bool largest) {
  const Tensor x = with_simple_cuts(input);
  if (!tensor::is_sharded(x)) return largest ? at::max(x, dim, keepdim) : at::min(x, dim, keepdim);
  const ReducedDims r(x, at::IntArrayRef(dim), keepdim);
  check_nonempty(op, x, r);
  if (!r.crosses_ranks()) {
    const Tensor piece = tensor::local(x);
    auto [value, index] =
        largest ? at::max(piece, r.dims[0], keepdim) : at::min(piece, r.dims[0], keepdim);
    return {r.finish(value), r.finish(index)};
  }
  const Position p = first_extreme(x, r, largest);
  const Tensor value = comm::records_grad(x) ? values_at(x, r, p.index) : p.value;
  return {r.finish(value), r.finish(p.index)};
}
std::tuple<Tensor, Tensor> max_dim(const Tensor& x, int64_t dim, bool keepdim) {
  return extreme_dim("max", x, dim, keepdim, true);
}
std::tuple<Tensor, Tensor> min_dim(const Tensor& x, int64_t dim, bool keepdim) {
  return extreme_dim("min", x, dim, keepdim, false);
}

/// Row-major number of this rank's first extreme element in the global tensor.
int64_t first_number(const Tensor& x, const Tensor& piece, bool largest) {
  int64_t rest = (largest ? at::argmax(piece) : at::argmin(piece)).item<int64_t>();
  std::vector<int64_t> at(piece.dim());
  for (int64_t d = piece.dim(); d-- > 0;) {
    at[d] = rest % piece.size(d);
    rest /= piece.size(d);
  }
  const spec::Layout& layout = tensor::layout_of(x);
  for (size_t c = 0; c < layout.cuts().size(); ++c)
    at[layout.cuts()[c].dim] += layout.local_offset(c);
  int64_t number = 0;
  for (int64_t d = 0; d < piece.dim(); ++d) number = number * x.size(d) + at[d];
  return number;
}

Tensor arg_extreme(const char* op, const Tensor& input, std::optional<int64_t> dim, bool keepdim,
                   bool largest) {
  const at::NoGradGuard no_grad;
  const Tensor x = with_simple_cuts(input);
  if (!tensor::is_sharded(x))
    return largest ? at::argmax(x, dim, keepdim) : at::argmin(x, dim, keepdim);
  if (dim) {
    const ReducedDims r(x, at::IntArrayRef(*dim), keepdim);
    check_nonempty(op, x, r);
    return r.finish(first_extreme(x, r, largest).index);
  }
  const ReducedDims r(x, std::nullopt, keepdim);
  check_nonempty(op, x, r);
  const Tensor piece = tensor::piece_of(x);
  const Tensor value = piece_extreme(piece, r, largest);
  const Tensor best = r.combine(value, largest ? Reduction::kMax : Reduction::kMin);
  Tensor index = at::full(value.sizes(), kNowhere, value.options().dtype(at::kLong));
  if (piece.numel() > 0) {
    index.fill_(first_number(x, piece, largest));
    index.masked_fill_(same_value(value, best).logical_not(), kNowhere);
  }
  return r.finish(r.combine(index, Reduction::kMin));
}
Tensor argmax_dim(const Tensor& x, std::optional<int64_t> dim, bool keepdim) {
  return arg_extreme("argmax", x, dim, keepdim, true);
}
Tensor argmin_dim(const Tensor& x, std::optional<int64_t> dim, bool keepdim) {
  return arg_extreme("argmin", x, dim, keepdim, false);
}

}  // namespace

SHARDFIELD_OPS(extrema) {
  table.composed("aten::amax", TORCH_FN(amax_dims));
  table.composed("aten::amin", TORCH_FN(amin_dims));
  table.composed("aten::max", TORCH_FN(max_all));
  table.composed("aten::min", TORCH_FN(min_all));
  table.composed("aten::aminmax", TORCH_FN(aminmax_dim));
  table.composed("aten::max.dim", TORCH_FN(max_dim));
  table.composed("aten::min.dim", TORCH_FN(min_dim));
  table.composed("aten::argmax", TORCH_FN(argmax_dim));
  table.composed("aten::argmin", TORCH_FN(argmin_dim));
}

}  // namespace shardfield::ops
