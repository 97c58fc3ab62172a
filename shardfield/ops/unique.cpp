// Distinct values. Every rank finds its own; only these travel, and the distinct ones among them
// are the result, plain on every rank. Where an element's value is in it stays with the element.

#include <ATen/ATen.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using spec::Cut;
using spec::Layout;
using tensor::layout_of;
using Three = std::tuple<Tensor, Tensor, Tensor>;

/// A vector of which every mesh rank holds a part of any length, whole on all; where the own part
/// begins. Collective over the mesh.
std::pair<Tensor, int64_t> joined(const Tensor& part, const spec::Mesh& mesh) {
  Cut cut{0, {}, std::vector<int64_t>(mesh.size())};
  for (int a = 0; a < mesh.num_axes(); ++a) cut.axes.push_back(a);
  const auto lengths = comm::all_gather_ints({part.numel()}, mesh, part.device());
  for (int r = 0; r < mesh.size(); ++r)
    cut.sizes[cut.piece_at(mesh, mesh.coord_of(r))] = lengths[r][0];
  const Layout* layout = spec::intern_layout(mesh, {cut});
  const Tensor whole = tensor::gather(tensor::make_sharded(part, layout, {cut.total()}));
  return {whole, layout->local_offset(0)};
}

/// True on the one rank of those that hold the same piece whose elements count.
bool counts_here(const Layout& layout) {
  const spec::Mesh& mesh = layout.mesh();
  for (int a = 0; a < mesh.num_axes(); ++a)
    if (!std::ranges::binary_search(layout.axes(), a) && mesh.coord[a] != 0) return false;
  return true;
}

Three unique_values(const Tensor& x, bool sorted, bool want_inverse, bool want_counts) {
  const at::NoGradGuard no_grad;
  const Layout& layout = layout_of(x);
  const Tensor piece = tensor::piece_of(x);
  const auto [own, own_inverse, own_counts] = at::_unique2(piece, sorted, true, true);
  const auto [all, begin] = joined(own, layout.mesh());
  const auto [values, place, repeats] = at::_unique2(all, sorted, true, false);
  const Tensor nothing = at::empty({0}, own_inverse.options());
  Tensor inverse = nothing, counts = nothing;
  if (want_inverse)
    inverse = tensor::make_sharded(
        place.narrow(0, begin, own.numel()).index_select(0, own_inverse.flatten()).view_as(piece),
        &layout, x.sizes());
  if (want_counts) {
    const Tensor counted = counts_here(layout) ? own_counts : at::zeros_like(own_counts);
    counts = at::zeros({values.numel()}, own_counts.options())
                 .index_add_(0, place, joined(counted, layout.mesh()).first);
  }
  return {values, inverse, counts};
}

std::tuple<Tensor, Tensor> unique_with_inverse(const Tensor& x, bool sorted, bool want_inverse) {
  const auto [values, inverse, counts] = unique_values(x, sorted, want_inverse, false);
  return {values, inverse};
}

}  // namespace

SHARDFIELD_OPS(unique) {
  table.composed("aten::_unique2", TORCH_FN(unique_values));
  table.composed("aten::_unique", TORCH_FN(unique_with_inverse));
}

}  // namespace shardfield::ops
