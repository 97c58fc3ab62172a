// Losses. Each is PyTorch's own loss of the pieces with reduction "none" or "sum"; a mean divides
// by the global count (or the global weight), so uneven and empty pieces are exact and the
// gradient of every rank is the serial one.

#include <ATen/ATen.h>
#include <ATen/ExpandUtils.h>
#include <ATen/core/Reduction.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/moments.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;

using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kNone = at::Reduction::None;
constexpr int64_t kMean = at::Reduction::Mean;
constexpr int64_t kSum = at::Reduction::Sum;

Tensor value_of(const MaybeTensor& t) {
  return t.value_or(Tensor());
}
MaybeTensor optional_of(const Tensor& t) {
  return t.defined() ? MaybeTensor(t) : std::nullopt;
}

/// A loss of broadcast operands, element by element.
/// @param loss  called with the pieces and a reduction, none or sum
template <class Loss>
Tensor elementwise_loss(const std::vector<Tensor>& operands, int64_t reduction, Loss&& loss) {
  std::vector<int64_t> sizes;
  for (const Tensor& t : operands)
    if (t.defined()) sizes = at::infer_size(sizes, t.sizes());
  std::vector<Tensor> shaping;
  for (const Tensor& t : operands)
    if (t.defined()) shaping.push_back(t);
  const dispatch::Reference reference = dispatch::reference_of(shaping, sizes);
  std::vector<Tensor> values;
  if (!reference.layout) {
    for (const Tensor& t : operands) values.push_back(t.defined() ? tensor::gather(t) : t);
    return loss(values, reduction);
  }
  const Layout& layout = *reference.layout;
  for (const Tensor& t : operands)
    values.push_back(t.defined() ? tensor::piece_for(t, layout, sizes) : t);
  if (reduction == kNone) return tensor::wrap(loss(values, kNone), &layout, sizes);
  if (layout.is_alone()) return loss(values, reduction);
  const Tensor sum = tensor::reduce_sum(loss(values, kSum), layout);
  return reduction == kMean ? sum / c10::multiply_integers(sizes) : sum;
}

Tensor mse_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  return elementwise_loss({x, target}, reduction, [](const std::vector<Tensor>& t, int64_t reduce) {
    return at::mse_loss(t[0], t[1], reduce);
  });
}
Tensor l1_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  return elementwise_loss({x, target}, reduction, [](const std::vector<Tensor>& t, int64_t reduce) {
    return at::l1_loss(t[0], t[1], reduce);
  });
}
Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, int64_t reduction, double beta) {
  return elementwise_loss({x, target}, reduction,
                          [&](const std::vector<Tensor>& t, int64_t reduce) {
                            return at::smooth_l1_loss(t[0], t[1], reduce, beta);
                          });
}
Tensor huber_loss(const Tensor& x, const Tensor& target, int64_t reduction, double delta) {
  return elementwise_loss({x, target}, reduction,
                          [&](const std::vector<Tensor>& t, int64_t reduce) {
                            return at::huber_loss(t[0], t[1], reduce, delta);
                          });
}
Tensor soft_margin_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  return elementwise_loss({x, target}, reduction, [](const std::vector<Tensor>& t, int64_t reduce) {
    return at::soft_margin_loss(t[0], t[1], reduce);
  });
}
Tensor binary_cross_entropy(const Tensor& x, const Tensor& target, const MaybeTensor& weight,
                            int64_t reduction) {
  return elementwise_loss({x, target, value_of(weight)}, reduction,
                          [](const std::vector<Tensor>& t, int64_t reduce) {
                            return at::binary_cross_entropy(t[0], t[1], optional_of(t[2]), reduce);
                          });
}
Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target,
                                        const MaybeTensor& weight, const MaybeTensor& pos_weight,
                                        int64_t reduction) {
  return elementwise_loss({x, target, value_of(weight), value_of(pos_weight)}, reduction,
                          [](const std::vector<Tensor>& t, int64_t reduce) {
                            return at::binary_cross_entropy_with_logits(
                                t[0], t[1], optional_of(t[2]), optional_of(t[3]), reduce);
                          });
}

/// The dim that holds the classes: the only one of a (C) input, else dim 1.
int class_dim(const Tensor& x) {
  return x.dim() == 1 ? 0 : 1;
}

std::vector<int64_t> without_dim(at::IntArrayRef sizes, int dim) {
  std::vector<int64_t> out = sizes.vec();
  out.erase(out.begin() + dim);
  return out;
}

const Layout* renumber_without(const Layout& layout, int64_t ndim, int dim, bool close_gap) {
  std::vector<int> new_dim(ndim);
  for (int d = 0; d < ndim; ++d) new_dim[d] = d == dim ? -1 : d - (close_gap && d > dim);
  return spec::renumber(layout, new_dim);
}

/// Weight of the targets that count, on this rank: the divisor of a mean. Not differentiable.
Tensor target_weight(const Tensor& target, const Tensor& weight, int64_t ignore_index) {
  const at::NoGradGuard no_grad;
  const Tensor flat = target.reshape(-1);
  const Tensor counts = flat != ignore_index;
  if (!weight.defined()) return counts.sum();
  return at::where(counts, weight.detach().index_select(0, at::where(counts, flat, 0)), 0).sum();
}

struct ClassLoss {
  const char* name;
  int64_t reduction;
  int64_t ignore_index;
};

/// The loss of an empty piece: zero, yet tied to its inputs to every order of derivative, so that
/// this rank joins each collective of backward.
Tensor nothing(const Tensor& x, const Tensor& target, const Tensor& weight) {
  Tensor zero = at::exp(x).sum();
  if (at::isFloatingType(target.scalar_type())) zero = zero * at::exp(target).sum();
  return weight.defined() ? zero * at::exp(weight).sum() : zero;
}

/// Losses of (N, C, ...) scores against classes (N, ...) or probabilities (N, C, ...). Scores must
/// hold all classes, so a class cut is dropped first.
/// @param loss  called with scores, target, weight and reduction, none or sum
template <class Loss>
Tensor class_loss(const ClassLoss& setting, const Tensor& scores, const Tensor& target,
                  const MaybeTensor& weight, Loss&& loss) {
  const Tensor w = tensor::gather(value_of(weight));
  const bool probabilities =
      target.sizes() == scores.sizes() && at::isFloatingType(target.scalar_type());
  const int dim = class_dim(scores);
  const Layout* layout = nullptr;
  if (is_sharded(scores)) {
    layout = renumber_without(layout_of(scores), scores.dim(), dim, false);
  } else if (is_sharded(target) && scores.dim() > 1) {
    std::vector<int> new_dim(target.dim());
    for (int d = 0; d < target.dim(); ++d) new_dim[d] = d + (!probabilities && d >= dim);
    layout = spec::renumber(layout_of(target), new_dim);
    if (layout && probabilities) layout = renumber_without(*layout, scores.dim(), dim, false);
  }
  if (!layout) return loss(tensor::gather(scores), tensor::gather(target), w, setting.reduction);
  const Layout* result_layout = renumber_without(*layout, scores.dim(), dim, true);
  const Layout* target_layout = probabilities ? layout : result_layout;
  const auto target_sizes = without_dim(scores.sizes(), dim);
  SHARDFIELD_CHECK(probabilities || target.sizes() == at::IntArrayRef(target_sizes), setting.name,
                   "expected class targets of sizes ", at::IntArrayRef(target_sizes), ", got ",
                   tensor::describe(target), " for scores ", tensor::describe(scores));
  const Tensor x = tensor::piece_for(scores, *layout, scores.sizes());
  const Tensor t = tensor::piece_for(target, *target_layout, target.sizes());
  const Tensor own_weight = w.defined() ? tensor::enter(w, *layout) : w;
  if (setting.reduction == kNone)
    return tensor::wrap(loss(x, t, own_weight, kNone), result_layout, target_sizes);
  if (layout->is_alone()) return loss(x, t, w, setting.reduction);
  const Tensor sum = x.numel() ? loss(x, t, own_weight, kSum) : nothing(x, t, own_weight);
  if (setting.reduction == kSum) return tensor::reduce_sum(sum, *layout);
  if (probabilities) return tensor::reduce_sum(sum, *layout) / c10::multiply_integers(target_sizes);
  const Tensor total = target_weight(t, w, setting.ignore_index).to(sum.scalar_type());
  const Tensor both = tensor::reduce_sum(at::stack({sum, total}), *layout);
  return both[0] / both[1];
}

Tensor cross_entropy_loss(const Tensor& x, const Tensor& target, const MaybeTensor& weight,
                          int64_t reduction, c10::SymInt ignore_index, double label_smoothing) {
  const int64_t ignore = ignore_index.guard_int(__FILE__, __LINE__);
  return class_loss({"cross_entropy_loss", reduction, ignore}, x, target, weight,
                    [&](const Tensor& s, const Tensor& t, const Tensor& w, int64_t reduce) {
                      return at::cross_entropy_loss(s, t, optional_of(w), reduce, ignore,
                                                    label_smoothing);
                    });
}

Tensor nll_loss_nd(const Tensor& x, const Tensor& target, const MaybeTensor& weight,
                   int64_t reduction, c10::SymInt ignore_index) {
  const int64_t ignore = ignore_index.guard_int(__FILE__, __LINE__);
  return class_loss({"nll_loss", reduction, ignore}, x, target, weight,
                    [&](const Tensor& s, const Tensor& t, const Tensor& w, int64_t reduce) {
                      return at::nll_loss_nd(s, t, optional_of(w), reduce, ignore);
                    });
}

}  // namespace

SHARDFIELD_OPS(loss) {
  table.composed("aten::mse_loss", TORCH_FN(mse_loss));
  table.composed("aten::l1_loss", TORCH_FN(l1_loss));
  table.composed("aten::smooth_l1_loss", TORCH_FN(smooth_l1_loss));
  table.composed("aten::huber_loss", TORCH_FN(huber_loss));
  table.composed("aten::soft_margin_loss", TORCH_FN(soft_margin_loss));
  table.composed("aten::binary_cross_entropy", TORCH_FN(binary_cross_entropy));
  table.composed("aten::binary_cross_entropy_with_logits",
                 TORCH_FN(binary_cross_entropy_with_logits));
  table.composed("aten::cross_entropy_loss", TORCH_FN(cross_entropy_loss));
  table.composed("aten::nll_loss_nd", TORCH_FN(nll_loss_nd));
  table.composed("aten::nll_loss", TORCH_FN(nll_loss_nd));
  table.composed("aten::nll_loss2d", TORCH_FN(nll_loss_nd));
}

}  // namespace shardfield::ops
