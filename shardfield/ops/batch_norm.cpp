// Batch normalization. Training: local statistics, one exchange, PyTorch's own kernels on the
// pieces; backward: the two sums per channel (the weight and bias gradients) in one all-reduce.
// Evaluation needs no communication. Running statistics are plain and equal on every rank.

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/moments.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/redistribute.h"

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

/// How a batch norm input is divided.
struct Division {
  explicit Division(const Tensor& x) : layout(layout_of(x)), channels(x.size(1)) {
    std::vector<int> channel_only(x.dim(), -1);
    channel_only[1] = 0;
    channel_layout = spec::renumber(layout, channel_only);
    axes = axes_across(layout, [](int dim) { return dim != 1; });
    reduced.assign(x.dim(), true);
    reduced[1] = false;
  }

  /// True when this rank needs nothing from others: it does what one device does.
  bool is_alone() const { return axes.empty() && !channel_layout; }

  /// This rank's channels of a per-channel tensor of any kind.
  Tensor slice(const Tensor& t) const {
    if (!t.defined()) return t;
    if (is_sharded(t)) {
      return tensor::redistribute_piece(piece_of(t), &layout_of(t), channel_layout, t.sizes());
    }
    return channel_layout ? tensor::slice_piece(t, *channel_layout).contiguous() : t;
  }
  /// All channels from this rank's. Collective over the channel cut.
  Tensor all(const Tensor& piece) const {
    return channel_layout ? tensor::redistribute_piece(piece, channel_layout, nullptr, {channels})
                          : piece;
  }
  Tensor wrap(const Tensor& piece) const {
    return channel_layout ? tensor::make_sharded(piece, channel_layout, {channels}) : piece;
  }

  const Layout& layout;
  const Layout* channel_layout;
  int64_t channels;
  std::vector<int> axes;
  std::vector<bool> reduced;
};

/// Moves running statistics toward the batch's; the variance by the global count.
void update_running(const Tensor& mean_to, const Tensor& variance_to, const Moments& moments,
                    double count, double momentum) {
  if (mean_to.defined()) {
    mean_to.mul_(1 - momentum).add_(moments.mean.to(mean_to.scalar_type()), momentum);
  }
  if (variance_to.defined()) {
    const Tensor unbiased = moments.variance * (count / (count - 1));
    variance_to.mul_(1 - momentum).add_(unbiased.to(variance_to.scalar_type()), momentum);
  }
}

Tensor like_input(Tensor piece, const Tensor& x) {
  return tensor::make_sharded(std::move(piece), &layout_of(x), x.sizes(),
                              x.suggest_memory_format());
}

/// A plain input that meets sharded per-channel tensors.
template <class Call>
auto with_plain(const MaybeTensor& a, const MaybeTensor& b, Call&& call) {
  return call(tensor::gather(value_of(a)), tensor::gather(value_of(b)));
}

Three native_batch_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                        const MaybeTensor& running_mean, const MaybeTensor& running_var,
                        bool training, double momentum, double eps) {
  if (!is_sharded(x)) {
    return with_plain(weight, bias, [&](const Tensor& w, const Tensor& b) {
      return at::native_batch_norm(x, w, b, running_mean, running_var, training, momentum, eps);
    });
  }
  const Division cut(x);
  const Tensor& piece = piece_of(x);
  const Tensor w = cut.slice(value_of(weight)), b = cut.slice(value_of(bias));
  if (!training) {
    const Tensor mean = cut.slice(value_of(running_mean)),
                 variance = cut.slice(value_of(running_var));
    Tensor y =
        piece.numel()
            ? std::get<0>(at::native_batch_norm(piece, w, b, mean, variance, false, momentum, eps))
            : at::empty_like(piece);
    return {like_input(std::move(y), x), at::empty({0}, mean.options()),
            at::empty({0}, mean.options())};
  }
  if (cut.is_alone() && piece.numel() > 0) {
    auto [y, mean, invstd] =
        at::native_batch_norm(piece, w, b, running_mean, running_var, true, momentum, eps);
    return {like_input(std::move(y), x), mean, invstd};
  }
  const double count =
      static_cast<double>(x.numel()) / static_cast<double>(std::max<int64_t>(x.size(1), 1));
  const Moments moments = combine_moments(
      local_moments(piece), counts_along(cut.layout, x.sizes(), cut.reduced, cut.axes),
      cut.layout.mesh(), cut.axes);
  Tensor y = apply_moments(piece, moments.mean, moments.variance, eps, w, b);
  if (value_of(running_mean).defined() || value_of(running_var).defined()) {
    const Moments whole{cut.all(moments.mean), cut.all(moments.variance)};
    update_running(value_of(running_mean), value_of(running_var), whole, count, momentum);
  }
  return {like_input(std::move(y), x), cut.wrap(moments.mean),
          cut.wrap((moments.variance + eps).rsqrt())};
}

/// dx = (w / std) (dy - mean(dy) - normalized * mean(dy * normalized)), in two passes.
Tensor input_gradient(const Tensor& dy, const Tensor& piece, const Tensor& weight,
                      const Tensor& mean, const Tensor& inverse_std, const Tensor& sums,
                      double count) {
  if (piece.numel() == 0) return at::empty_like(piece);
  const Tensor scale = weight.defined() ? inverse_std * weight : inverse_std;
  const Tensor part = sums * (scale / -count);
  const Tensor variance = inverse_std.square().reciprocal();
  Tensor dx =
      std::get<0>(at::native_batch_norm(piece, part[1], part[0], mean, variance, false, 0.0, 0.0));
  std::vector<int64_t> broadcast(piece.dim(), 1);
  broadcast[1] = scale.numel();
  return dx.addcmul_(dy, scale.view(broadcast));
}

Three native_batch_norm_backward(const Tensor& dy, const Tensor& x, const MaybeTensor& weight,
                                 const MaybeTensor& running_mean, const MaybeTensor& running_var,
                                 const MaybeTensor& save_mean, const MaybeTensor& save_invstd,
                                 bool train, double eps, std::array<bool, 3> mask) {
  if (!is_sharded(x)) {
    return with_plain(weight, dy, [&](const Tensor& w, const Tensor& g) {
      return at::native_batch_norm_backward(g, x, w, running_mean, running_var, save_mean,
                                            save_invstd, train, eps, mask);
    });
  }
  const Division cut(x);
  if (cut.is_alone() && x.numel() > 0) {
    auto [dx, dw, db] = at::native_batch_norm_backward(
        tensor::piece_for(dy, cut.layout, x.sizes()), piece_of(x), tensor::gather(value_of(weight)),
        running_mean, running_var, save_mean, save_invstd, train, eps, mask);
    return {dx.defined() ? like_input(std::move(dx), x) : dx, dw, db};
  }
  const auto type = accumulate_type(x.scalar_type());
  const Tensor piece = piece_of(x).to(type);
  const Tensor grad = tensor::piece_for(dy, cut.layout, x.sizes()).to(type);
  Tensor w = cut.slice(value_of(weight));
  if (w.defined()) w = w.to(type);
  const Tensor mean = cut.slice(value_of(train ? save_mean : running_mean)).to(type);
  const Tensor inverse_std = train ? cut.slice(value_of(save_invstd)).to(type)
                                   : (cut.slice(value_of(running_var)).to(type) + eps).rsqrt();
  Tensor sums = at::zeros({2, mean.numel()}, mean.options());
  if (train || mask[1] || mask[2]) {
    sums = gradient_sums(grad, piece, mean, inverse_std);
    if (!cut.axes.empty()) sums = comm::all_reduce(sums, cut.layout.mesh(), cut.axes);
  }
  Tensor dx;
  if (mask[0]) {
    const double count = static_cast<double>(x.numel()) / static_cast<double>(x.size(1));
    const Tensor scale = w.defined() ? inverse_std * w : inverse_std;
    std::vector<int64_t> broadcast(piece.dim(), 1);
    broadcast[1] = scale.numel();
    dx = train ? input_gradient(grad, piece, w, mean, inverse_std, sums, count)
               : grad * scale.view(broadcast);
    dx = like_input(dx.to(x.scalar_type()), x);
  }
  const auto parameter_type = value_of(weight).defined() ? value_of(weight).scalar_type() : type;
  const auto finish = [&](int row) { return cut.wrap(sums[row].to(parameter_type)); };
  return {dx, mask[1] ? finish(1) : Tensor(), mask[2] ? finish(0) : Tensor()};
}

/// Stock batch_norm looks for cuDNN by the input's device; pieces choose their own kernels.
Tensor batch_norm(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                  const MaybeTensor& running_mean, const MaybeTensor& running_var, bool training,
                  double momentum, double eps, bool) {
  SHARDFIELD_CHECK(x.dim() >= 2, "batch_norm", "expected an input of two or more dims, got ",
                   x.sizes());
  for (const MaybeTensor* t : {&weight, &bias, &running_mean, &running_var}) {
    const Tensor v = value_of(*t);
    SHARDFIELD_CHECK(!v.defined() || v.numel() == x.size(1), "batch_norm",
                     "expected weight, bias and running statistics of ", x.size(1),
                     " channels, got ", v.sizes(), " (input ", tensor::describe(x), ")");
  }
  SHARDFIELD_CHECK(
      training || (value_of(running_mean).defined() && value_of(running_var).defined()),
      "batch_norm",
      "expected running_mean and running_var in evaluation mode, got none; pass training=True");
  if (!is_sharded(x)) {
    return at::batch_norm(x, tensor::gather(value_of(weight)), tensor::gather(value_of(bias)),
                          tensor::gather(value_of(running_mean)),
                          tensor::gather(value_of(running_var)), training, momentum, eps, true);
  }
  // Cut channels: weight and bias are cut alike above autograd, so that their gradients come whole.
  const Layout* channels = Division(x).channel_layout;
  const Tensor w = channels ? tensor::redistribute(value_of(weight), channels) : value_of(weight);
  const Tensor b = channels ? tensor::redistribute(value_of(bias), channels) : value_of(bias);
  return std::get<0>(
      at::native_batch_norm(x, w, b, running_mean, running_var, training, momentum, eps));
}

// The same op under the names that PyTorch's exporters use.

Three legit(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias, Tensor& mean,
            Tensor& variance, bool training, double momentum, double eps) {
  return at::native_batch_norm(x, weight, bias, mean, variance, training, momentum, eps);
}
Three legit_without_statistics(const Tensor& x, const MaybeTensor& weight, const MaybeTensor& bias,
                               bool training, double momentum, double eps) {
  return at::native_batch_norm(x, weight, bias, {}, {}, training, momentum, eps);
}
std::tuple<Tensor, Tensor, Tensor, Tensor> with_update(const Tensor& x, const MaybeTensor& weight,
                                                       const MaybeTensor& bias, Tensor& mean,
                                                       Tensor& variance, double momentum,
                                                       double eps) {
  auto [y, saved_mean, saved_invstd] =
      at::native_batch_norm(x, weight, bias, mean, variance, true, momentum, eps);
  return {y, saved_mean, saved_invstd, at::empty({0}, piece_of(x).options().dtype(at::kByte))};
}

}  // namespace

SHARDFIELD_OPS(batch_norm) {
  table.composed("aten::_native_batch_norm_legit", TORCH_FN(legit));
  table.composed("aten::_native_batch_norm_legit.no_stats", TORCH_FN(legit_without_statistics));
  table.composed("aten::_batch_norm_with_update", TORCH_FN(with_update));
  table.composed("aten::batch_norm", TORCH_FN(batch_norm));
  table.backend("aten::native_batch_norm", TORCH_FN(native_batch_norm));
  table.backend("aten::native_batch_norm_backward", TORCH_FN(native_batch_norm_backward));
}

}  // namespace shardfield::ops
