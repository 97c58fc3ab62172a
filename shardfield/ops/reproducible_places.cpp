// Ops that copy elements to other places, or add at places, in reproducible mode: where several
// values meet in one place, in the op or in its gradient, their sum is exact.

#include <ATen/ATen.h>

#include "shardfield/ops/exact_sums.h"
#include "shardfield/ops/reproducible_form.h"

namespace shardfield::ops {

namespace {

namespace op = at::_ops;
using at::Scalar;
using at::Tensor;

/// An op that selects or copies elements of its input.
template <class Op, class Schema = typename Op::schema>
struct Copying;
template <class Op, class... A>
struct Copying<Op, Tensor(const Tensor&, A...)> {
  static Tensor run(const Tensor& x, A... a) {
    return with_exact_gradient(x, [&](const Tensor& t) { return Op::call(t, a...); });
  }
};

/// The same where the op also tells which elements it selected.
template <class Op, class Schema = typename Op::schema>
struct CopyingWithIndex;
template <class Op, class... A>
struct CopyingWithIndex<Op, std::tuple<Tensor, Tensor>(const Tensor&, A...)> {
  static std::tuple<Tensor, Tensor> run(const Tensor& x, A... a) {
    Tensor index;
    const Tensor value = with_exact_gradient(x, [&](const Tensor& t) {
      auto [selected, where] = Op::call(t, a...);
      index = where;
      return selected;
    });
    return {value, index};
  }
};

Tensor added_at_index(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source,
                      const Scalar& alpha) {
  const Tensor sums = exact_sum(source, index.numel(), [&](const Tensor& part) {
    return at::index_add(at::zeros_like(x, part.scalar_type()), dim, index, part);
  });
  return x + (alpha.equal(1) ? sums : sums * alpha);
}
Tensor added_at_places(const Tensor& x, int64_t dim, const Tensor& index, const Tensor& source) {
  return x + exact_sum(source, x.dim() ? source.size(dim) : 1, [&](const Tensor& part) {
           return at::scatter_add(at::zeros_like(x, part.scalar_type()), dim, index, part);
         });
}

}  // namespace

SHARDFIELD_OPS(reproducible_places) {
  table.reproducible_composed("aten::max_pool1d", TORCH_FN(Copying<op::max_pool1d>::run));
  table.reproducible_composed("aten::max_pool2d", TORCH_FN(Copying<op::max_pool2d>::run));
  table.reproducible_composed("aten::max_pool3d", TORCH_FN(Copying<op::max_pool3d>::run));
  table.reproducible_composed("aten::max_pool2d_with_indices",
                              TORCH_FN(CopyingWithIndex<op::max_pool2d_with_indices>::run));
  table.reproducible_composed("aten::max_pool3d_with_indices",
                              TORCH_FN(CopyingWithIndex<op::max_pool3d_with_indices>::run));
  table.reproducible_composed("aten::adaptive_max_pool2d",
                              TORCH_FN(CopyingWithIndex<op::adaptive_max_pool2d>::run));
  table.reproducible_composed("aten::adaptive_max_pool3d",
                              TORCH_FN(CopyingWithIndex<op::adaptive_max_pool3d>::run));
  table.reproducible_composed("aten::upsample_nearest1d",
                              TORCH_FN(Copying<op::upsample_nearest1d>::run));
  table.reproducible_composed("aten::upsample_nearest2d",
                              TORCH_FN(Copying<op::upsample_nearest2d>::run));
  table.reproducible_composed("aten::upsample_nearest3d",
                              TORCH_FN(Copying<op::upsample_nearest3d>::run));
  table.reproducible_composed("aten::_upsample_nearest_exact1d",
                              TORCH_FN(Copying<op::_upsample_nearest_exact1d>::run));
  table.reproducible_composed("aten::_upsample_nearest_exact2d",
                              TORCH_FN(Copying<op::_upsample_nearest_exact2d>::run));
  table.reproducible_composed("aten::_upsample_nearest_exact3d",
                              TORCH_FN(Copying<op::_upsample_nearest_exact3d>::run));
  table.reproducible_composed("aten::reflection_pad1d",
                              TORCH_FN(Copying<op::reflection_pad1d>::run));
  table.reproducible_composed("aten::reflection_pad2d",
                              TORCH_FN(Copying<op::reflection_pad2d>::run));
  table.reproducible_composed("aten::reflection_pad3d",
                              TORCH_FN(Copying<op::reflection_pad3d>::run));
  table.reproducible_composed("aten::replication_pad1d",
                              TORCH_FN(Copying<op::replication_pad1d>::run));
  table.reproducible_composed("aten::replication_pad2d",
                              TORCH_FN(Copying<op::replication_pad2d>::run));
  table.reproducible_composed("aten::replication_pad3d",
                              TORCH_FN(Copying<op::replication_pad3d>::run));
  table.reproducible_composed("aten::index.Tensor", TORCH_FN(Copying<op::index_Tensor>::run));
  table.reproducible_composed("aten::index_select", TORCH_FN(Copying<op::index_select>::run));
  table.reproducible_composed("aten::gather", TORCH_FN(Copying<op::gather>::run));
  table.reproducible_composed("aten::embedding", TORCH_FN(Copying<op::embedding>::run));
  table.reproducible_composed("aten::_pad_circular", TORCH_FN(Copying<op::_pad_circular>::run));
  table.reproducible_composed("aten::index_add",
                              TORCH_FN((UnderFormula<at::_ops::index_add, &added_at_index>::run)));
  table.reproducible_composed(
      "aten::scatter_add", TORCH_FN((UnderFormula<at::_ops::scatter_add, &added_at_places>::run)));
}

}  // namespace shardfield::ops
