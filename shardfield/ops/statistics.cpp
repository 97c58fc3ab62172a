// Variances and norms. Means come first and are exact over all ranks, then the squares of what is
// left: two all-reduces, no cancellation, and derivatives of every order follow.

#include <limits>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/reduced_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::OptionalIntArrayRef;
using at::Scalar;
using at::Tensor;
using OptScalar = std::optional<Scalar>;
using Dtype = std::optional<at::ScalarType>;

struct Moments {
  Tensor var, mean;
};

/// Per-rank result values (not wrapped) of variance and mean in at least float precision.
Moments moments(const Tensor& x, const ReducedDims& r, double correction) {
  Tensor piece = tensor::local(x);
  if (piece.scalar_type() == at::kHalf || piece.scalar_type() == at::kBFloat16)
    piece = piece.to(at::kFloat);
  const auto n = static_cast<double>(r.count(x));
  const auto sum = [&](const Tensor& t, bool keepdim) {
    const Tensor part = at::sum(t, r.dims, keepdim);
    return r.crosses_ranks() ? tensor::reduce_sum(part, r.source->mesh(), r.axes) : part;
  };
  const Tensor mean = sum(piece, true) / n;
  const Tensor centred = piece - tensor::enter(mean, r.source->mesh(), r.axes);
  const Tensor squares =
      centred.is_complex() ? at::real(centred * centred.conj()) : centred * centred;
  const double freedom = std::max(0.0, n - correction);
  // 0 / 0 as one device: nan.
  Moments out{sum(squares, r.keepdim) / freedom, mean};
  if (!r.keepdim) out.mean = out.mean.squeeze(r.dims);
  return out;
}

/// sqrt whose derivative at 0 is 0, as std's.
Tensor safe_sqrt(const Tensor& v) {
  const Tensor zero = v.eq(0);
  return at::sqrt(v.masked_fill(zero, 1)).masked_fill(zero, 0);
}

Moments wrapped_moments(const char* op, const Tensor& x, OptionalIntArrayRef dims,
                        const OptScalar& correction, bool keepdim, bool root) {
  SHARDFIELD_CHECK(at::isFloatingType(x.scalar_type()) || x.is_complex(), op,
                   "only supports floating point and complex dtypes, got ", x.scalar_type());
  const ReducedDims r(x, dims, keepdim);
  Moments m = moments(x, r, correction ? correction->toDouble() : 1.0);
  if (root) m.var = safe_sqrt(m.var);
  const auto real = c10::toRealValueType(x.scalar_type());
  return {r.finish(m.var.to(real)), r.finish(m.mean.to(x.scalar_type()))};
}

Tensor var_dims(const Tensor& x, OptionalIntArrayRef dims, const OptScalar& correction,
                bool keepdim) {
  return wrapped_moments("var", x, dims, correction, keepdim, false).var;
}
Tensor std_dims(const Tensor& x, OptionalIntArrayRef dims, const OptScalar& correction,
                bool keepdim) {
  return wrapped_moments("std", x, dims, correction, keepdim, true).var;
}
std::tuple<Tensor, Tensor> var_mean_dims(const Tensor& x, OptionalIntArrayRef dims,
                                         const OptScalar& correction, bool keepdim) {
  const Moments m = wrapped_moments("var_mean", x, dims, correction, keepdim, false);
  return {m.var, m.mean};
}
std::tuple<Tensor, Tensor> std_mean_dims(const Tensor& x, OptionalIntArrayRef dims,
                                         const OptScalar& correction, bool keepdim) {
  const Moments m = wrapped_moments("std_mean", x, dims, correction, keepdim, true);
  return {m.var, m.mean};
}

// Norms.

/// The norm of the ranks' norms; PyTorch's own formulas know the corners (zero vectors, p < 1).
Tensor norm_of_norms(const Tensor& x, const Scalar& ord, const ReducedDims& r) {
  Tensor piece = tensor::local(x);
  const auto type = piece.scalar_type();
  if (type == at::kHalf || type == at::kBFloat16) piece = piece.to(at::kFloat);
  const Tensor part = at::linalg_vector_norm(piece, ord, r.dims, r.keepdim);
  const Tensor whole = at::linalg_vector_norm(r.stack_partials(part), ord, at::IntArrayRef(0));
  return r.finish(whole.to(c10::toRealValueType(type)));
}

/// Any other p. Where PyTorch's formula gives 0 (zero elements, zero vectors), so does this.
Tensor norm_of_powers(const Tensor& x, const Scalar& ord, const ReducedDims& r) {
  const double p = ord.toDouble();
  const auto type = c10::toRealValueType(x.scalar_type());
  Tensor size = tensor::local(x).abs();
  if (type == at::kHalf || type == at::kBFloat16) size = size.to(at::kFloat);
  Tensor powers;
  if (p > 0) {
    const Tensor zero = size.eq(0);
    powers = size.masked_fill(zero, 1).pow(ord).masked_fill(zero, 0);
  } else {
    powers = size.pow(ord);
  }
  const Tensor sum =
      tensor::reduce_sum(at::sum(powers, r.dims, r.keepdim), r.source->mesh(), r.axes);
  const Tensor none = sum.eq(0);
  return r.finish(sum.masked_fill(none, 1).pow(1 / p).masked_fill(none, 0).to(type));
}

Tensor vector_norm(const Tensor& self, const Scalar& ord, OptionalIntArrayRef dims, bool keepdim,
                   Dtype dtype) {
  const Tensor x = dtype ? self.to(*dtype) : self;
  SHARDFIELD_CHECK(at::isFloatingType(x.scalar_type()) || x.is_complex(), "linalg_vector_norm",
                   "expected a floating point or complex dtype, got ", x.scalar_type(),
                   "; pass dtype=");
  const ReducedDims r(x, dims, keepdim);
  if (!r.crosses_ranks())
    return r.finish(at::linalg_vector_norm(tensor::local(x), ord, r.dims, keepdim));
  const double p = ord.toDouble();
  const double inf = std::numeric_limits<double>::infinity();
  if (p == inf) return at::amax(x.abs(), r.dims, keepdim);
  if (p == -inf) return at::amin(x.abs(), r.dims, keepdim);
  if (p == 0) return at::sum(x.ne(0), r.dims, keepdim, c10::toRealValueType(x.scalar_type()));
  if (p == 1 || p == 2) return norm_of_norms(x, ord, r);
  return norm_of_powers(x, ord, r);
}

Tensor norm_scalar(const Tensor& x, const Scalar& p) {
  return vector_norm(x, p, std::nullopt, false, std::nullopt);
}
Tensor norm_dtype(const Tensor& x, const OptScalar& p, at::ScalarType dtype) {
  return vector_norm(x, p.value_or(2), std::nullopt, false, dtype);
}
Tensor norm_dims(const Tensor& x, const OptScalar& p, at::IntArrayRef dims, bool keepdim) {
  return vector_norm(x, p.value_or(2), dims, keepdim, std::nullopt);
}
Tensor norm_dims_dtype(const Tensor& x, const OptScalar& p, at::IntArrayRef dims, bool keepdim,
                       at::ScalarType dtype) {
  return vector_norm(x, p.value_or(2), dims, keepdim, dtype);
}
Tensor distance(const Tensor& a, const Tensor& b, const Scalar& p) {
  return at::linalg_vector_norm(a - b, p);
}

/// Slices along `dim` of a norm above `most` are scaled down to it.
Tensor renormed(const Tensor& x, const Scalar& p, int64_t dim, const Scalar& most) {
  SHARDFIELD_CHECK(x.dim() > 1, "renorm", "expected an input of at least 2 dims, got ",
                   tensor::describe(x));
  SHARDFIELD_CHECK(p.toDouble() > 0 && most.toDouble() >= 0, "renorm",
                   "expected p above 0 and maxnorm of at least 0, got ", p, " and ", most);
  dim = at::maybe_wrap_dim(dim, x.dim());
  std::vector<int64_t> others;
  for (int64_t d = 0; d < x.dim(); ++d)
    if (d != dim) others.push_back(d);
  const Tensor size = at::linalg_vector_norm(x, p, others, true);
  const Tensor factor =
      at::where(size > most, (size + 1e-7).reciprocal() * most, at::ones_like(size));
  return x * factor;
}
Tensor& renorm_(Tensor& x, const Scalar& p, int64_t dim, const Scalar& most) {
  return x.copy_(renormed(x, p, dim, most));
}

}  // namespace

SHARDFIELD_OPS(statistics) {
  table.composed("aten::renorm", TORCH_FN(renormed));
  table.composed("aten::renorm_", TORCH_FN(renorm_));
  table.composed("aten::var.correction", TORCH_FN(var_dims));
  table.composed("aten::std.correction", TORCH_FN(std_dims));
  table.composed("aten::var_mean.correction", TORCH_FN(var_mean_dims));
  table.composed("aten::std_mean.correction", TORCH_FN(std_mean_dims));
  table.composed("aten::linalg_vector_norm", TORCH_FN(vector_norm));
  table.composed("aten::norm.Scalar", TORCH_FN(norm_scalar));
  table.composed("aten::norm.ScalarOpt_dtype", TORCH_FN(norm_dtype));
  table.composed("aten::norm.ScalarOpt_dim", TORCH_FN(norm_dims));
  table.composed("aten::norm.ScalarOpt_dim_dtype", TORCH_FN(norm_dims_dtype));
  table.composed("aten::dist", TORCH_FN(distance));
}

}  // namespace shardfield::ops
