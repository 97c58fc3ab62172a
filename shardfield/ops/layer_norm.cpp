// Layer and RMS normalization. Normalized dims that no rank shares: PyTorch's own kernel on the
// piece, no communication; weight and bias gradients in one all-reduce. Cut normalized dims: the
// statistics are reduced over the ranks and weight and bias are sliced.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/comm/gradient_law.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/moments.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/redistribute.h"
#include "shardfield/tensor/whole_gradient.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using tensor::make_sharded;
using tensor::piece_of;

using MaybeTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor value_of(const MaybeTensor& t) {
  return t.value_or(Tensor());
}

bool cuts_any_from(const Layout& layout, int64_t first) {
  for (const spec::Cut& cut : layout.cuts())
    if (cut.dim >= first) return true;
  return false;
}

/// A layer norm input whose normalized dims (from `lead` on) are cut.
struct Division {
  Division(const Tensor& x, int64_t lead)
      : layout(layout_of(x)), sizes(x.sizes().vec()), lead(lead) {
    std::vector<int> rows(x.dim(), -1), columns(x.dim(), -1);
    for (int d = 0; d < x.dim(); ++d)
      (d < lead ? rows : columns)[d] = static_cast<int>(d < lead ? d : d - lead);
    row_layout = spec::renumber(layout, rows);
    column_layout = spec::renumber(layout, columns);
    axes = axes_across(layout, [&](int dim) { return dim >= lead; });
    row_axes = axes_across(layout, [&](int dim) { return dim < lead; });
    row_sizes = sizes;
    std::fill(row_sizes.begin() + lead, row_sizes.end(), 1);
    column_sizes.assign(sizes.begin() + lead, sizes.end());
  }
  std::vector<double> counts() const {
    std::vector<bool> reduced(sizes.size());
    for (size_t d = 0; d < sizes.size(); ++d) reduced[d] = static_cast<int64_t>(d) >= lead;
    return counts_along(layout, sizes, reduced, axes);
  }
  double count() const { return static_cast<double>(c10::multiply_integers(column_sizes)); }
  std::vector<int64_t> column_dims() const {
    std::vector<int64_t> dims;
    for (int64_t d = lead; d < static_cast<int64_t>(sizes.size()); ++d) dims.push_back(d);
    return dims;
  }
  std::vector<int64_t> row_dims() const {
    std::vector<int64_t> dims;
    for (int64_t d = 0; d < lead; ++d) dims.push_back(d);
    return dims;
  }
  Tensor columns(const Tensor& weight) const {
    return !weight.defined() || !column_layout ? weight
                                               : tensor::slice_piece(weight, *column_layout);
  }
  Tensor rows(const Tensor& piece) const {
    return row_layout ? make_sharded(piece, row_layout, row_sizes) : piece;
  }
  Tensor rows_piece(const Tensor& t) const {
    if (is_sharded(t))
      return tensor::redistribute_piece(piece_of(t), &layout_of(t), row_layout, t.sizes());
    return row_layout ? tensor::slice_piece(t, *row_layout) : t;
  }

  const Layout& layout;
  const Layout* row_layout;
  const Layout* column_layout;
  std::vector<int> axes, row_axes;
  std::vector<int64_t> sizes, row_sizes, column_sizes;
  int64_t lead;
};

Tensor normalized(const Tensor& piece, const Tensor& mean, const Tensor& rstd) {
  return (piece - mean) * rstd;
}

Three split_layer_norm(const Tensor& x, const Tensor& weight, const Tensor& bias,
                       const Division& cut, double eps) {
  const auto type = accumulate_type(x.scalar_type());
  const Tensor piece = piece_of(x).to(type);
  auto row_shape = piece.sizes().vec();
  std::fill(row_shape.begin() + cut.lead, row_shape.end(), 1);
  Moments own{at::zeros(row_shape, piece.options()), at::zeros(row_shape, piece.options())};
  if (piece.numel() > 0) {
    std::tie(own.variance, own.mean) =
        at::var_mean(piece, cut.column_dims(), std::optional<at::Scalar>(0), true);
  }
  own = combine_moments({own.mean.reshape(-1), own.variance.reshape(-1)}, cut.counts(),
                        cut.layout.mesh(), cut.axes);
  const Tensor mean = own.mean.view(row_shape), rstd = (own.variance + eps).rsqrt().view(row_shape);
  Tensor y = normalized(piece, mean, rstd);
  if (weight.defined()) y = y * cut.columns(weight);
  if (bias.defined()) y = y + cut.columns(bias);
  return {make_sharded(y.to(x.scalar_type()), &cut.layout, cut.sizes), cut.rows(mean),
          cut.rows(rstd)};
}

Three native_layer_norm(const Tensor& x, c10::SymIntArrayRef shape, const MaybeTensor& weight,
                        const MaybeTensor& bias, double eps) {
  if (!is_sharded(x)) {
    return at::native_layer_norm_symint(x, shape, tensor::gather(value_of(weight)),
                                        tensor::gather(value_of(bias)), eps);
  }
  const Layout& layout = layout_of(x);
  const int64_t lead = x.dim() - static_cast<int64_t>(shape.size());
  if (lead >= 0 && !cuts_any_from(layout, lead)) {
    auto [y, mean, rstd] = at::native_layer_norm_symint(piece_of(x), shape, weight, bias, eps);
    std::vector<int64_t> row_sizes(x.sizes().begin(), x.sizes().end());
    std::fill(row_sizes.begin() + lead, row_sizes.end(), 1);
    Tensor out = x.is_contiguous() ? tensor::make_like(std::move(y), tensor::impl_of(x))
                                   : make_sharded(std::move(y), &layout, x.sizes());
    return {std::move(out), make_sharded(std::move(mean), &layout, row_sizes),
            make_sharded(std::move(rstd), &layout, row_sizes)};
  }
  SHARDFIELD_CHECK(lead >= 0 && x.sizes().slice(lead) == C10_AS_INTARRAYREF_SLOW(shape),
                   "layer_norm",
                   "expected normalized_shape to be the last sizes of the input, got ", shape,
                   " and ", tensor::describe(x));
  return split_layer_norm(x, tensor::gather(value_of(weight)), tensor::gather(value_of(bias)),
                          Division(x, lead), eps);
}

/// Weight and bias gradients summed over the ranks that hold other rows, in one message.
void reduce_parameters(Tensor& dw, Tensor& db, const spec::Mesh& mesh,
                       const std::vector<int>& axes) {
  if (axes.empty() || (!dw.defined() && !db.defined())) return;
  std::vector<Tensor> parts;
  if (dw.defined()) parts.push_back(dw);
  if (db.defined()) parts.push_back(db);
  const Tensor sum =
      comm::all_reduce(parts.size() == 1 ? parts[0].unsqueeze(0) : at::stack(parts), mesh, axes);
  if (dw.defined()) dw = sum[0];
  if (db.defined()) db = sum[sum.size(0) - 1];
}

Three split_layer_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                const Tensor& rstd, const Tensor& weight, const Tensor& bias,
                                const Division& cut, std::array<bool, 3> mask) {
  const auto type = accumulate_type(x.scalar_type());
  const Tensor grad = tensor::piece_for(dy, cut.layout, cut.sizes).to(type);
  const Tensor own_rstd = cut.rows_piece(rstd);
  const Tensor hat = normalized(piece_of(x).to(type), cut.rows_piece(mean), own_rstd);
  Tensor dx, dw, db;
  if (mask[0]) {
    const Tensor g = weight.defined() ? grad * cut.columns(weight) : grad;
    const auto dims = cut.column_dims();
    Tensor sums = at::stack({g.sum(dims, true), (g * hat).sum(dims, true)});
    if (!cut.axes.empty()) sums = comm::all_reduce(sums, cut.layout.mesh(), cut.axes);
    sums = sums / cut.count();
    dx = make_sharded(((g - sums[0] - hat * sums[1]) * own_rstd).to(x.scalar_type()), &cut.layout,
                      cut.sizes);
  }
  const auto over_rows = [&](const Tensor& t) { return cut.lead == 0 ? t : t.sum(cut.row_dims()); };
  if (mask[1]) dw = over_rows(grad * hat);
  if (mask[2]) db = over_rows(grad);
  reduce_parameters(dw, db, cut.layout.mesh(), cut.row_axes);
  const auto whole = [&](const Tensor& t, const Tensor& like) {
    if (!t.defined()) return t;
    const Tensor sum = tensor::redistribute_piece(t, cut.column_layout, nullptr, cut.column_sizes)
                           .to(like.defined() ? like.scalar_type() : type);
    comm::remember_gradient_sum(sum, cut.layout.mesh(), cut.layout.axes());
    return sum;
  };
  return {dx, whole(dw, weight), whole(db, bias)};
}

Three native_layer_norm_backward(const Tensor& dy, const Tensor& x, c10::SymIntArrayRef shape,
                                 const Tensor& mean, const Tensor& rstd, const MaybeTensor& weight,
                                 const MaybeTensor& bias, std::array<bool, 3> mask) {
  const Tensor w = tensor::gather(value_of(weight)), b = tensor::gather(value_of(bias));
  if (!is_sharded(x)) {
    return at::native_layer_norm_backward_symint(tensor::gather(dy), x, shape, tensor::gather(mean),
                                                 tensor::gather(rstd), w, b, mask);
  }
  const Layout& layout = layout_of(x);
  const int64_t lead = x.dim() - static_cast<int64_t>(shape.size());
  if (cuts_any_from(layout, lead))
    return split_layer_norm_backward(dy, x, mean, rstd, w, b, Division(x, lead), mask);
  const Tensor grad = tensor::piece_for(dy, layout, x.sizes());
  auto row_sizes = x.sizes().vec();
  std::fill(row_sizes.begin() + lead, row_sizes.end(), 1);
  auto [dx, dw, db] = at::native_layer_norm_backward_symint(
      grad, piece_of(x), shape, tensor::piece_for(mean, layout, row_sizes),
      tensor::piece_for(rstd, layout, row_sizes), w, b, mask);
  reduce_parameters(dw, db, layout.mesh(), axes_across(layout, [](int) { return true; }));
  if (dx.defined()) {
    dx = x.is_contiguous() ? tensor::make_like(std::move(dx), tensor::impl_of(x))
                           : make_sharded(std::move(dx), &layout, x.sizes());
  }
  return {dx, dw, db};
}

bool needs_gradient(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias) {
  if (!at::GradMode::is_enabled()) return false;
  return x.requires_grad() || value_of(weight).requires_grad() || value_of(bias).requires_grad();
}

/// Sharded weights beside a plain or sharded input are gathered, with their gradient.
Tensor layer_norm(const Tensor& x, c10::SymIntArrayRef shape, const MaybeTensor& weight,
                  const MaybeTensor& bias, double eps, bool cudnn) {
  const auto is_given = [](const MaybeTensor& t) { return t.has_value() && is_sharded(*t); };
  if (is_given(weight) || is_given(bias)) {
    const auto plain = [&](const MaybeTensor& t) {
      return is_given(t) ? MaybeTensor(tensor::gather(*t)) : t;
    };
    return at::layer_norm_symint(x, shape, plain(weight), plain(bias), eps, cudnn);
  }
  const int64_t lead = x.dim() - static_cast<int64_t>(shape.size());
  const bool is_local = lead >= 0 && !cuts_any_from(layout_of(x), lead);
  if (needs_gradient(x, weight, bias)) {
    const MaybeTensor w = is_local ? weight : tensor::with_whole_gradient(weight);
    const MaybeTensor b = is_local ? bias : tensor::with_whole_gradient(bias);
    return std::get<0>(dispatch::call_formula<at::_ops::native_layer_norm>(x, shape, w, b, eps));
  }
  if (is_local) {
    const at::AutoDispatchBelowADInplaceOrView below;
    Tensor y = std::get<0>(at::native_layer_norm_symint(piece_of(x), shape, weight, bias, eps));
    return x.is_contiguous() ? tensor::make_like(std::move(y), tensor::impl_of(x))
                             : make_sharded(std::move(y), &layout_of(x), x.sizes());
  }
  return std::get<0>(at::native_layer_norm_symint(x, shape, weight, bias, eps));
}

/// The default eps is that of the accumulating type, as in PyTorch.
double rms_eps(std::optional<double> eps, at::ScalarType type) {
  if (eps.has_value()) return *eps;
  return accumulate_type(type) == at::kDouble ? std::numeric_limits<double>::epsilon()
                                              : std::numeric_limits<float>::epsilon();
}

Tensor rms_norm(const Tensor& x, c10::SymIntArrayRef shape, const MaybeTensor& weight,
                std::optional<double> eps) {
  const Tensor w = value_of(weight);
  if (!is_sharded(x)) return at::rms_norm_symint(x, shape, tensor::gather(w), eps);
  const Layout& layout = layout_of(x);
  const int64_t lead = x.dim() - static_cast<int64_t>(shape.size());
  SHARDFIELD_CHECK(lead >= 0 && x.sizes().slice(lead) == C10_AS_INTARRAYREF_SLOW(shape), "rms_norm",
                   "expected normalized_shape to be the last sizes of the input, got ", shape,
                   " and ", tensor::describe(x));
  if (!cuts_any_from(layout, lead)) {
    // PyTorch's formulas tell an absent weight from an undefined one.
    const MaybeTensor own =
        w.defined() ? MaybeTensor(tensor::enter(tensor::gather(w), layout)) : std::nullopt;
    return tensor::wrap(at::rms_norm_symint(tensor::local(x), shape, own, eps), &layout, x.sizes());
  }
  const Division cut(x, lead);
  const auto type = accumulate_type(x.scalar_type());
  const Tensor wide = tensor::local(x).to(type);
  // The sum is plain along the axes of the normalized dims only.
  std::vector<int> normalized_dims(x.dim(), -1);
  for (int64_t d = lead; d < x.dim(); ++d) normalized_dims[d] = static_cast<int>(d);
  const Layout& across = *spec::renumber(layout, normalized_dims);
  const Tensor own_square = wide.square().sum(cut.column_dims(), true);
  const Tensor square = tensor::enter(tensor::reduce_sum(own_square, across), across);
  const Tensor rms = (square / cut.count() + rms_eps(eps, x.scalar_type())).rsqrt();
  Tensor y = wide * rms;
  if (w.defined()) y = y * tensor::piece_for(w, layout, x.sizes());
  return tensor::wrap(y.to(x.scalar_type()), &layout, x.sizes());
}

}  // namespace

SHARDFIELD_OPS(layer_norm) {
  table.composed("aten::layer_norm", TORCH_FN(layer_norm));
  table.composed("aten::rms_norm", TORCH_FN(rms_norm));
  table.backend("aten::native_layer_norm", TORCH_FN(native_layer_norm));
  table.backend("aten::native_layer_norm_backward", TORCH_FN(native_layer_norm_backward));
}

}  // namespace shardfield::ops
