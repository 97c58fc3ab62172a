// Losses in reproducible mode, written out of sums and elementwise ops.

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

#include "shardfield/base/error.h"
#include "shardfield/ops/reproducible_form.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using c10::SymInt;
using OptTensor = std::optional<Tensor>;

Tensor reduced(const Tensor& loss, int64_t reduction) {
  if (reduction == at::Reduction::Mean) return at::mean(loss);
  return reduction == at::Reduction::Sum ? at::sum(loss) : loss;
}
Tensor mse_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  const Tensor difference = x - target;
  return reduced(difference * difference, reduction);
}
Tensor l1_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  return reduced((x - target).abs(), reduction);
}
Tensor smooth_l1_loss(const Tensor& x, const Tensor& target, int64_t reduction, double beta) {
  const Tensor size = (x - target).abs();
  if (beta == 0) return reduced(size, reduction);
  return reduced(at::where(size < beta, size * size * (0.5 / beta), size - 0.5 * beta), reduction);
}
Tensor huber_loss(const Tensor& x, const Tensor& target, int64_t reduction, double delta) {
  const Tensor size = (x - target).abs();
  return reduced(at::where(size <= delta, size * size * 0.5, (size - 0.5 * delta) * delta),
                 reduction);
}
Tensor soft_margin_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  return reduced(at::softplus(-target * x), reduction);
}
Tensor weighted(const Tensor& loss, const OptTensor& weight) {
  return is_given(weight) ? loss * *weight : loss;
}
Tensor binary_cross_entropy(const Tensor& x, const Tensor& target, const OptTensor& weight,
                            int64_t reduction) {
  const Tensor loss =
      -(target * at::log(x).clamp_min(-100) + (1 - target) * at::log1p(-x).clamp_min(-100));
  return reduced(weighted(loss, weight), reduction);
}
Tensor binary_cross_entropy_with_logits(const Tensor& x, const Tensor& target,
                                        const OptTensor& weight, const OptTensor& pos_weight,
                                        int64_t reduction) {
  Tensor log_term = at::softplus(-x);
  if (is_given(pos_weight)) log_term = log_term * (1 + (*pos_weight - 1) * target);
  return reduced(weighted((1 - target) * x + log_term, weight), reduction);
}

/// x (C), (N, C) or (N, C, ...) of log probabilities.
Tensor nll_loss(const Tensor& x, const Tensor& target, const OptTensor& weight, int64_t reduction,
                SymInt ignore) {
  const int64_t classes = x.dim() == 1 ? 0 : 1;
  std::vector<int64_t> wanted = x.sizes().vec();
  wanted.erase(wanted.begin() + classes);
  SHARDFIELD_CHECK(target.sizes() == at::IntArrayRef(wanted), "cross_entropy_loss",
                   "expected class targets of sizes ", at::IntArrayRef(wanted), " for input ",
                   x.sizes(), ", got ", target.sizes());
  const Tensor counts = target.ne(ignore.guard_int(__FILE__, __LINE__));
  const Tensor label = target.masked_fill(counts.logical_not(), 0);
  Tensor share = counts.to(x.scalar_type());
  if (is_given(weight)) share = share * at::embedding(weight->unsqueeze(1), label).squeeze(-1);
  const Tensor loss = -at::gather(x, classes, label.unsqueeze(classes)).squeeze(classes) * share;
  if (reduction == at::Reduction::Mean) return at::sum(loss) / at::sum(share);
  return reduced(loss, reduction);
}

}  // namespace

SHARDFIELD_OPS(reproducible_losses) {
  table.reproducible_composed("aten::mse_loss", TORCH_FN(mse_loss));
  table.reproducible_composed("aten::l1_loss", TORCH_FN(l1_loss));
  table.reproducible_composed("aten::smooth_l1_loss", TORCH_FN(smooth_l1_loss));
  table.reproducible_composed("aten::huber_loss", TORCH_FN(huber_loss));
  table.reproducible_composed("aten::soft_margin_loss", TORCH_FN(soft_margin_loss));
  table.reproducible_composed("aten::binary_cross_entropy", TORCH_FN(binary_cross_entropy));
  table.reproducible_composed("aten::binary_cross_entropy_with_logits",
                              TORCH_FN(binary_cross_entropy_with_logits));
  table.reproducible_decomposed("aten::cross_entropy_loss");
  for (const char* name : {"aten::nll_loss_nd", "aten::nll_loss", "aten::nll_loss2d"})
    table.reproducible_composed(name, TORCH_FN(nll_loss));
}

}  // namespace shardfield::ops
