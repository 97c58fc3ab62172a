// Losses of whole samples: margins over classes, CTC over sequences. Samples stay where they are
// cut; each rank computes its own samples' losses, and the reduction is that of any sharded tensor.

#include <numeric>

#include <ATen/ATen.h>
#include <ATen/core/Reduction.h>

#include "shardfield/base/error.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/ops/cut_rows.h"
#include "shardfield/ops/whole_dims.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Layout;
using tensor::is_sharded;
using tensor::layout_of;
using MaybeTensor = std::optional<Tensor>;

Tensor reduced(const Tensor& losses, int64_t reduction) {
  if (reduction == at::Reduction::Mean) return losses.mean();
  if (reduction == at::Reduction::Sum) return losses.sum();
  return losses;
}

/// One loss per sample of (samples, classes). `stock(x, target)` gives those of some samples.
template <class Stock>
Tensor margin_loss(const char* op, const Tensor& given, const Tensor& target, int64_t reduction,
                   Stock&& stock) {
  const Tensor x = with_whole_dim(op, with_simple_cuts(given), given.dim() - 1);
  if (!is_sharded(x)) return reduced(stock(x, tensor::gather(target)), reduction);
  SHARDFIELD_CHECK(target.dim() > 0 && target.size(0) == x.size(0), op, "expected ", x.size(0),
                   " targets, got ", tensor::describe(target), " for ", tensor::describe(x));
  const Layout* layout = &layout_of(x);
  const Tensor piece = tensor::local(x);
  const Tensor own_target = tensor::local(tensor::redistribute(target, layout));
  const Tensor own =
      piece.size(0) > 0 ? stock(piece, own_target) : empty_result(piece, std::vector<int64_t>{0});
  return reduced(tensor::wrap(own, layout, x.size(0)), reduction);
}

Tensor multi_margin_loss(const Tensor& x, const Tensor& target, const at::Scalar& p,
                         const at::Scalar& margin, const MaybeTensor& weight, int64_t reduction) {
  return margin_loss(
      "multi_margin_loss", x, target, reduction, [&](const Tensor& t, const Tensor& own_target) {
        const MaybeTensor w = weight ? MaybeTensor(tensor::gather(*weight)) : weight;
        return at::multi_margin_loss(t, own_target, p, margin, w, at::Reduction::None);
      });
}

Tensor multilabel_loss(const Tensor& x, const Tensor& target, int64_t reduction) {
  return margin_loss("multilabel_margin_loss", x, target, reduction,
                     [&](const Tensor& t, const Tensor& own_target) {
                       return at::multilabel_margin_loss(t, own_target, at::Reduction::None);
                     });
}
/// The mask of targets serves PyTorch's own backward, which is not used here.
std::tuple<Tensor, Tensor> multilabel_margin_loss_forward(const Tensor& x, const Tensor& target,
                                                          int64_t reduction) {
  return {multilabel_loss(x, target, reduction), at::empty({0})};
}

int64_t sum_of(at::IntArrayRef lengths) {
  return std::accumulate(lengths.begin(), lengths.end(), int64_t{0});
}

/// log_probs (time, samples, classes); targets (samples, length) or one after the other. The second
/// result serves PyTorch's own backward, which is not used here.
std::tuple<Tensor, Tensor> ctc_loss(const Tensor& given, const Tensor& given_targets,
                                    at::IntArrayRef input_lengths, at::IntArrayRef target_lengths,
                                    int64_t blank, bool zero_infinity) {
  Tensor x = with_simple_cuts(given);
  const Tensor targets = tensor::gather(given_targets);
  for (int64_t d : {0, 2}) x = with_whole_dim("ctc_loss", x, d, {0, 2});
  if (!is_sharded(x))
    return at::_ctc_loss(x, targets, input_lengths, target_lengths, blank, zero_infinity);
  const auto samples = static_cast<size_t>(x.size(1));
  SHARDFIELD_CHECK(input_lengths.size() == samples && target_lengths.size() == samples, "ctc_loss",
                   "expected ", samples, " input and target lengths, got ", input_lengths.size(),
                   " and ", target_lengths.size());
  const Layout& layout = layout_of(x);
  const Tensor piece = tensor::local(x);
  const int64_t begin = layout.local_offset(0), count = piece.size(1);
  const auto own_lengths = target_lengths.slice(begin, count);
  const Tensor own_targets =
      targets.dim() > 1
          ? targets.narrow(0, begin, count)
          : targets.narrow(0, sum_of(target_lengths.slice(0, begin)), sum_of(own_lengths));
  const Tensor own =
      count > 0 ? std::get<0>(at::_ctc_loss(piece, own_targets, input_lengths.slice(begin, count),
                                            own_lengths, blank, zero_infinity))
                : empty_result(piece, std::vector<int64_t>{0});
  const Layout* of_samples = spec::renumber(layout, std::vector<int>{-1, 0, -1});
  return {tensor::wrap(own, of_samples, x.size(1)), at::empty({0})};
}

std::vector<int64_t> as_numbers(const Tensor& lengths) {
  const Tensor list = tensor::gather(lengths).to(at::kCPU, at::kLong).contiguous();
  return {list.const_data_ptr<int64_t>(), list.const_data_ptr<int64_t>() + list.numel()};
}
std::tuple<Tensor, Tensor> ctc_loss_tensor(const Tensor& x, const Tensor& targets,
                                           const Tensor& input_lengths,
                                           const Tensor& target_lengths, int64_t blank,
                                           bool zero_infinity) {
  return ctc_loss(x, targets, as_numbers(input_lengths), as_numbers(target_lengths), blank,
                  zero_infinity);
}

}  // namespace

SHARDFIELD_OPS(sample_loss) {
  table.composed("aten::multi_margin_loss", TORCH_FN(multi_margin_loss));
  table.composed("aten::multilabel_margin_loss_forward", TORCH_FN(multilabel_margin_loss_forward));
  table.composed("aten::_ctc_loss", TORCH_FN(ctc_loss));
  table.composed("aten::_ctc_loss.Tensor", TORCH_FN(ctc_loss_tensor));
}

}  // namespace shardfield::ops
