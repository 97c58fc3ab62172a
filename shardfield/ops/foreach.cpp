// List ops that look across ranks: norms and maxima of gradients, the overflow check of gradient
// scaling. Elementwise list ops run on the pieces (dispatch/tensor_lists).

#include <map>

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/comm/collectives.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Scalar;
using at::Tensor;
using tensor::is_sharded;
using tensor::layout_of;
using tensor::piece_of;
using Dtype = std::optional<at::ScalarType>;

/// Norms of sharded entries by mesh axes: one all-reduce for all that share them. Only for p > 0,
/// p finite.
void norms_of_pieces(const std::vector<Tensor>& tensors, const std::vector<size_t>& which,
                     const Scalar& p, Dtype dtype, std::vector<Tensor>& out) {
  std::map<std::pair<const spec::Mesh*, std::vector<int>>, std::vector<size_t>> groups;
  for (size_t k : which)
    groups[{&layout_of(tensors[k]).mesh(), layout_of(tensors[k]).axes()}].push_back(k);
  // Every rank walks the groups in the order of their first entry, not of mesh addresses.
  std::map<size_t, std::vector<size_t>> in_order;
  for (auto& [key, members] : groups) in_order[members[0]] = members;
  for (const auto& [first, members] : in_order) {
    std::vector<Tensor> powers;
    for (size_t k : members) {
      const auto type = dtype.value_or(tensors[k].scalar_type());
      const auto exact =
          type == at::kDouble || type == at::kComplexDouble ? at::kDouble : at::kFloat;
      const Tensor piece = piece_of(tensors[k]);
      powers.push_back(at::linalg_vector_norm(piece.is_complex() ? piece : piece.to(exact), p)
                           .to(at::kDouble)
                           .pow(p));
    }
    const spec::Layout& layout = layout_of(tensors[first]);
    const Tensor sums =
        comm::all_reduce(at::stack(powers), layout.mesh(), layout.axes()).pow(1 / p.toDouble());
    for (size_t i = 0; i < members.size(); ++i) {
      const auto type = c10::toRealValueType(dtype.value_or(tensors[members[i]].scalar_type()));
      out[members[i]] = sums[static_cast<int64_t>(i)].to(type);
    }
  }
}

std::vector<Tensor> foreach_norm(at::TensorList tensors, const Scalar& p, Dtype dtype) {
  std::vector<Tensor> out(tensors.size()), plain;
  std::vector<size_t> sharded;
  for (size_t k = 0; k < tensors.size(); ++k) {
    if (is_sharded(tensors[k]))
      sharded.push_back(k);
    else
      plain.push_back(tensors[k]);
  }
  const double order = p.toDouble();
  if (order > 0 && std::isfinite(order)) {
    norms_of_pieces(tensors.vec(), sharded, p, dtype, out);
  } else {
    for (size_t k : sharded) out[k] = at::linalg_vector_norm(tensors[k], p, {}, false, dtype);
  }
  const auto norms = plain.empty() ? std::vector<Tensor>() : at::_foreach_norm(plain, p, dtype);
  size_t next = 0;
  for (size_t k = 0; k < tensors.size(); ++k)
    if (!is_sharded(tensors[k])) out[k] = norms[next++];
  return out;
}

std::vector<Tensor> foreach_max(at::TensorList tensors) {
  std::vector<Tensor> out;
  for (const Tensor& t : tensors) out.push_back(at::max(t));
  return out;
}

/// All ranks skip the step together when one finds an overflow.
void check_and_unscale(at::TensorList tensors, Tensor& found_inf, const Tensor& inv_scale) {
  std::vector<Tensor> pieces;
  std::vector<const spec::Mesh*> meshes;
  for (const Tensor& t : tensors) {
    const Tensor piece = is_sharded(t) ? piece_of(t) : t;
    if (piece.numel() > 0) pieces.push_back(piece);
    if (!is_sharded(t)) continue;
    const spec::Mesh* mesh = &layout_of(t).mesh();
    if (std::find(meshes.begin(), meshes.end(), mesh) == meshes.end()) meshes.push_back(mesh);
  }
  if (!pieces.empty()) at::_amp_foreach_non_finite_check_and_unscale_(pieces, found_inf, inv_scale);
  for (const spec::Mesh* mesh : meshes) {
    std::vector<int> axes;
    for (int a = 0; a < mesh->num_axes(); ++a) axes.push_back(a);
    found_inf.copy_(comm::all_reduce(found_inf, *mesh, axes, comm::Reduction::kMax));
  }
}

}  // namespace

SHARDFIELD_OPS(foreach) {
  table.backend("aten::_foreach_norm.Scalar", TORCH_FN(foreach_norm));
  table.backend("aten::_foreach_max", TORCH_FN(foreach_max));
  table.composed("aten::_amp_foreach_non_finite_check_and_unscale_", TORCH_FN(check_and_unscale));
}

}  // namespace shardfield::ops
