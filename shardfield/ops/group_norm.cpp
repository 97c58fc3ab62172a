// Group and instance normalization. Spatial cuts: local statistics per (sample, group), one
// exchange; backward: two sums per (sample, channel) in one all-reduce, from which the input,
// weight and bias gradients all follow. Batch cuts alone need no communication in forward.
// PyTorch's own derivative formulas sit above these kernels.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
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
using tensor::piece_of;

using MaybeTensor = std::optional<Tensor>;
using Three = std::tuple<Tensor, Tensor, Tensor>;

Tensor value_of(const MaybeTensor& t) {
  return t.value_or(Tensor());
}

/// How a group norm input is divided. Groups reach over channels, so a channel cut is dropped
/// (gathered) first; `layout` is nullptr when nothing else is cut.
struct Division {
  Division(const Tensor& x, int64_t groups)
      : own(layout_of(x)), sizes(x.sizes().vec()), groups(groups) {
    std::vector<int> keep(x.dim()), batch(x.dim(), -1);
    for (int d = 0; d < x.dim(); ++d) keep[d] = d == 1 ? -1 : d;
    batch[0] = 0;
    layout = spec::renumber(own, keep);
    batch_layout = spec::renumber(own, batch);
    if (layout) {
      axes = axes_across(*layout, [](int dim) { return dim > 1; });
      batch_axes = axes_across(*layout, [](int dim) { return dim == 0; });
    }
  }
  Tensor piece(const Tensor& x) const {
    if (!is_sharded(x)) return layout ? tensor::slice_piece(x, *layout) : x;
    return tensor::redistribute_piece(piece_of(x), &layout_of(x), layout, sizes);
  }
  Tensor result(const Tensor& piece) const {
    return tensor::make_sharded(tensor::redistribute_piece(piece, layout, &own, sizes), &own,
                                sizes);
  }
  /// Statistics (N, G) of this rank's samples.
  Tensor statistics(const Tensor& piece) const {
    return batch_layout ? tensor::make_sharded(piece, batch_layout, {sizes[0], groups}) : piece;
  }
  Tensor statistics_piece(const Tensor& t) const {
    if (is_sharded(t)) {
      return tensor::redistribute_piece(piece_of(t), &layout_of(t), batch_layout, t.sizes());
    }
    return batch_layout ? tensor::slice_piece(t, *batch_layout) : t;
  }
  std::vector<double> counts() const {
    std::vector<bool> reduced(sizes.size(), true);
    reduced[0] = false;
    auto counts = counts_along(*layout, sizes, reduced, axes);
    return counts;  // channels per group is a common factor
  }
  /// Elements of one group over all ranks.
  double group_size() const {
    double n = static_cast<double>(sizes[1]) / static_cast<double>(groups);
    for (size_t d = 2; d < sizes.size(); ++d) n *= static_cast<double>(sizes[d]);
    return n;
  }

  const Layout& own;
  const Layout* layout;
  const Layout* batch_layout;
  std::vector<int> axes;  ///< mesh axes across the spatial cuts
  std::vector<int> batch_axes;
  std::vector<int64_t> sizes;
  int64_t groups;
};

/// (1, N * channels, rest): batch norm kernels then work per (sample, channel).
Tensor as_rows(const Tensor& piece, int64_t channels) {
  const int64_t rows = piece.size(0) * channels;
  return piece.view({1, rows, rows ? piece.numel() / rows : 0});
}

/// A per-(sample, group) value for each (sample, channel).
Tensor per_channel(const Tensor& per_group, int64_t channels_per_group) {
  return per_group.repeat_interleave(channels_per_group);
}

/// A per-channel weight for each (sample, channel).
Tensor per_sample(const Tensor& weight, int64_t samples) {
  return weight.defined() ? weight.repeat({samples}) : weight;
}

/// No other rank holds a part, and what the statistics are of is not cut even in name.
bool runs_alone(const Tensor& x) {
  const Layout& layout = layout_of(x);
  return layout.is_alone() && !layout.is_cut(0) && !layout.is_cut(1) && x.numel() > 0;
}

Three native_group_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                        c10::SymInt n, c10::SymInt c, c10::SymInt hxw, int64_t groups, double eps) {
  const Tensor w = tensor::gather(value_of(weight)), b = tensor::gather(value_of(bias));
  if (!is_sharded(x)) return at::native_group_norm_symint(x, w, b, n, c, hxw, groups, eps);
  if (runs_alone(x) && piece_of(x).is_contiguous(x.suggest_memory_format())) {
    auto [y, mean, rstd] = at::native_group_norm_symint(piece_of(x), w, b, n, c, hxw, groups, eps);
    return {tensor::make_like(std::move(y), tensor::impl_of(x)), mean, rstd};
  }
  const Division cut(x, groups);
  Tensor piece = cut.piece(x);
  if (piece.suggest_memory_format() == at::MemoryFormat::Contiguous || !cut.axes.empty())
    piece = piece.contiguous();
  const int64_t samples = piece.size(0), channels = piece.size(1);
  const auto type = accumulate_type(x.scalar_type());
  if (cut.axes.empty() && piece.numel() > 0) {
    auto [y, mean, rstd] = at::native_group_norm(piece, w, b, samples, channels,
                                                 piece.numel() / (samples * channels), groups, eps);
    return {cut.result(y), cut.statistics(mean), cut.statistics(rstd)};
  }
  if (cut.axes.empty()) {
    const Tensor none = at::zeros({samples, groups}, piece.options().dtype(type));
    return {cut.result(at::empty_like(piece)), cut.statistics(none), cut.statistics(none)};
  }
  const Moments moments = combine_moments(local_moments(as_rows(piece, groups)), cut.counts(),
                                          cut.layout->mesh(), cut.axes);
  const int64_t per_group = channels / groups;
  const Tensor y = apply_moments(as_rows(piece, channels), per_channel(moments.mean, per_group),
                                 per_channel(moments.variance, per_group), eps,
                                 per_sample(w, samples), per_sample(b, samples));
  const auto stored = value_of(weight).defined() ? value_of(weight).scalar_type() : x.scalar_type();
  const auto statistics = [&](const Tensor& t) {
    return cut.statistics(t.view({samples, groups}).to(stored));
  };
  return {cut.result(y.view_as(piece)), statistics(moments.mean),
          statistics((moments.variance + eps).rsqrt())};
}

/// Input gradient from the sums (2, N * C) of dy and dy * normalized.
Tensor input_gradient(const Tensor& dy, const Tensor& rows, const Tensor& weight,
                      const Tensor& mean, const Tensor& rstd, const Tensor& sums,
                      const Division& cut) {
  if (rows.numel() == 0) return at::empty_like(rows);
  const int64_t per_group = cut.sizes[1] / cut.groups;
  const Tensor weighted = weight.defined() ? sums * weight : sums;
  const Tensor group_sums = weighted.view({2, -1, per_group}).sum(2) / -cut.group_size();
  const Tensor spread = group_sums.repeat_interleave(per_group, 1) * rstd;
  Tensor dx = std::get<0>(at::native_batch_norm(rows, spread[1], spread[0], mean,
                                                rstd.square().reciprocal(), false, 0.0, 0.0));
  const Tensor scale = weight.defined() ? rstd * weight : rstd;
  return dx.addcmul_(dy, scale.view({1, -1, 1}));
}

Three native_group_norm_backward(const Tensor& dy, const Tensor& x, const Tensor& mean,
                                 const Tensor& rstd, const MaybeTensor& weight, c10::SymInt n,
                                 c10::SymInt c, c10::SymInt hxw, int64_t groups,
                                 std::array<bool, 3> mask) {
  const Tensor w_stored = tensor::gather(value_of(weight));
  if (!is_sharded(x)) {
    return at::native_group_norm_backward_symint(tensor::gather(dy), x, tensor::gather(mean),
                                                 tensor::gather(rstd), w_stored, n, c, hxw, groups,
                                                 mask);
  }
  if (runs_alone(x) && is_sharded(dy) && &layout_of(dy) == &layout_of(x)) {
    auto [dx, dw, db] = at::native_group_norm_backward_symint(piece_of(dy), piece_of(x), mean, rstd,
                                                              w_stored, n, c, hxw, groups, mask);
    if (dx.defined()) dx = tensor::make_sharded_strided(dx, &layout_of(x), x.sizes(), dx.strides());
    return {dx, dw, db};
  }
  const Division cut(x, groups);
  const auto type = accumulate_type(x.scalar_type());
  const Tensor piece = cut.piece(x).contiguous(), grad = cut.piece(dy).contiguous();
  const Tensor own_mean = cut.statistics_piece(mean), own_rstd = cut.statistics_piece(rstd);
  const int64_t samples = piece.size(0), channels = piece.size(1);
  Tensor dx, dw, db;
  if (cut.axes.empty() && piece.numel() > 0) {
    std::tie(dx, dw, db) =
        at::native_group_norm_backward(grad, piece, own_mean, own_rstd, w_stored, samples, channels,
                                       piece.numel() / (samples * channels), groups, mask);
  } else {
    const Tensor w = per_sample(w_stored.defined() ? w_stored.to(type) : w_stored, samples);
    const Tensor rows = as_rows(piece.to(type), channels),
                 grad_rows = as_rows(grad.to(type), channels);
    const int64_t per_group = channels / groups;
    const Tensor row_mean = per_channel(own_mean.reshape(-1).to(type), per_group);
    const Tensor row_rstd = per_channel(own_rstd.reshape(-1).to(type), per_group);
    Tensor sums = gradient_sums(grad_rows, rows, row_mean, row_rstd);
    if (!cut.axes.empty()) sums = comm::all_reduce(sums, cut.layout->mesh(), cut.axes);
    if (mask[0]) {
      dx = input_gradient(grad_rows, rows, w, row_mean, row_rstd, sums, cut)
               .view_as(piece)
               .to(x.scalar_type());
    }
    const Tensor parameters = sums.view({2, samples, channels}).sum(1);
    const auto stored = w_stored.defined() ? w_stored.scalar_type() : type;
    dw = parameters[1].to(stored);
    db = parameters[0].to(stored);
  }
  if (!cut.batch_axes.empty() && (mask[1] || mask[2])) {
    std::vector<Tensor> parts;
    if (mask[1]) parts.push_back(dw);
    if (mask[2]) parts.push_back(db);
    const Tensor sum = comm::all_reduce(at::stack(parts), cut.layout->mesh(), cut.batch_axes);
    if (mask[1]) dw = sum[0];
    if (mask[2]) db = sum[sum.size(0) - 1];
  }
  return {mask[0] ? cut.result(dx) : Tensor(), mask[1] ? dw : Tensor(), mask[2] ? db : Tensor()};
}

/// Stock group_norm, with the gradients of weight and bias kept plain when channels are cut.
Tensor group_norm(const Tensor& x, int64_t groups, const MaybeTensor& weight,
                  const MaybeTensor& bias, double eps, bool cudnn) {
  if (!is_sharded(x)) {
    return at::group_norm(x, groups, tensor::gather(value_of(weight)),
                          tensor::gather(value_of(bias)), eps, cudnn);
  }
  SHARDFIELD_CHECK(x.dim() >= 2 && groups > 0 && x.size(1) % groups == 0, "group_norm",
                   "expected channels that ", groups, " groups divide, got ", tensor::describe(x));
  for (const MaybeTensor* t : {&weight, &bias}) {
    const Tensor v = value_of(*t);
    SHARDFIELD_CHECK(!v.defined() || (v.dim() == 1 && v.numel() == x.size(1)), "group_norm",
                     "expected weight and bias of ", x.size(1), " channels, got ", v.sizes());
  }
  // Any cut: a second gradient may come back with the batch or channels still in pieces.
  const bool alone = runs_alone(x);
  const auto own = [&](const MaybeTensor& t) {
    const Tensor plain = tensor::gather(value_of(t));
    return alone ? plain : tensor::with_whole_gradient(plain);
  };
  const Tensor w = own(weight), b = own(bias);
  const int64_t rest = c10::multiply_integers(x.sizes().slice(2));
  const Tensor in = x.contiguous(x.suggest_memory_format());
  if (!tensor::records_grad(in) && !tensor::records_grad(w) && !tensor::records_grad(b))
    return std::get<0>(at::native_group_norm(in, w, b, x.size(0), x.size(1), rest, groups, eps));
  return std::get<0>(dispatch::call_formula<at::_ops::native_group_norm>(
      in, w, b, x.size(0), x.size(1), rest, groups, eps));
}

/// Instance norm without running statistics is group norm with one channel per group; with them,
/// PyTorch's own form: batch norm of one sample of N * C channels.
Tensor instance_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                     const MaybeTensor& running_mean, const MaybeTensor& running_var,
                     bool use_input_stats, double momentum, double eps, bool) {
  const Tensor mean = value_of(running_mean), variance = value_of(running_var);
  SHARDFIELD_CHECK(use_input_stats || (mean.defined() && variance.defined()), "instance_norm",
                   "expected running_mean and running_var when use_input_stats=False, got none");
  const Tensor w = tensor::gather(value_of(weight)), b = tensor::gather(value_of(bias));
  if (!is_sharded(x))
    return at::instance_norm(x, w, b, mean, variance, use_input_stats, momentum, eps, true);
  if (!use_input_stats) return at::batch_norm(x, w, b, mean, variance, false, momentum, eps, false);
  if (!mean.defined() && !variance.defined()) return at::group_norm(x, x.size(1), w, b, eps, false);
  const int64_t n = x.size(0), c = x.size(1);
  const auto repeat = [&](const Tensor& t) { return t.defined() ? t.repeat({n}) : t; };
  const Tensor all_means = repeat(mean), all_variances = repeat(variance);
  auto sizes = x.sizes().vec();
  sizes[1] *= n;
  sizes[0] = 1;
  const Tensor y = at::batch_norm(x.contiguous().view(sizes), repeat(w), repeat(b), all_means,
                                  all_variances, true, momentum, eps, false);
  {
    const at::NoGradGuard no_grad;
    if (mean.defined()) mean.copy_(all_means.view({n, c}).mean(0));
    if (variance.defined()) variance.copy_(all_variances.view({n, c}).mean(0));
  }
  return y.view(x.sizes());
}

}  // namespace

SHARDFIELD_OPS(group_norm) {
  table.composed("aten::group_norm", TORCH_FN(group_norm));
  table.backend("aten::native_group_norm", TORCH_FN(native_group_norm));
  table.backend("aten::native_group_norm_backward", TORCH_FN(native_group_norm_backward));
  table.composed("aten::instance_norm", TORCH_FN(instance_norm));
}

}  // namespace shardfield::ops
