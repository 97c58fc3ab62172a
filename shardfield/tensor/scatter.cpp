#include "shardfield/tensor/scatter.h"

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/spec/range.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/redistribute.h"

namespace shardfield::tensor {

at::Tensor scatter_from(const std::optional<at::Tensor>& full, const spec::Layout* layout,
                        at::IntArrayRef sizes, at::ScalarType dtype, int source) {
  const at::NoGradGuard no_grad;
  TORCH_INTERNAL_ASSERT(layout, "scatter_from needs a cut");
  const spec::Mesh& mesh = layout->mesh();
  std::vector<comm::Message> sends, recvs;
  at::Tensor piece;
  if (mesh.rank == source) {
    for (int r = 0; r < mesh.size(); ++r) {
      const at::Tensor block = block_view(*full, *layout, mesh.coord_of(r));
      const auto local_sizes =
          layout->local_sizes_at(sizes.data(), static_cast<int>(sizes.size()), mesh.coord_of(r));
      at::Tensor part = block.reshape(local_sizes);
      if (r == source)
        piece = part.clone(at::MemoryFormat::Contiguous);
      else
        sends.push_back({r, part.contiguous()});
    }
  } else {
    piece = at::empty(piece_sizes(*layout, sizes), at::TensorOptions().dtype(dtype));
    recvs.push_back({source, piece});
  }
  comm::start_exchange(mesh, std::move(sends), std::move(recvs)).wait();
  return make_sharded(piece, layout, sizes);
}

const spec::Layout* chunk_layout(const spec::Mesh& mesh, const std::vector<int>& dims,
                                 at::IntArrayRef sizes) {
  SHARDFIELD_CHECK(static_cast<int>(dims.size()) == mesh.num_axes(), "shard_tensor",
                   "expected one placement per mesh axis (", mesh.num_axes(), "), got ",
                   dims.size());
  std::vector<spec::Cut> cuts;
  for (int axis = 0; axis < mesh.num_axes(); ++axis) {
    const int dim = dims[axis];
    if (dim < 0) continue;
    SHARDFIELD_CHECK(dim < static_cast<int>(sizes.size()), "shard_tensor", "Shard(", dim,
                     ") on a tensor of sizes ", sizes, "; choose a dim below ", sizes.size());
    auto same =
        std::find_if(cuts.begin(), cuts.end(), [&](const spec::Cut& c) { return c.dim == dim; });
    if (same == cuts.end()) {
      cuts.push_back({dim, {axis}, spec::chunk_sizes(sizes[dim], mesh.shape[axis])});
      continue;
    }
    std::vector<int64_t> finer;
    for (int64_t s : same->sizes)
      for (int64_t part : spec::chunk_sizes(s, mesh.shape[axis])) finer.push_back(part);
    same->sizes = std::move(finer);
    same->axes.push_back(axis);
  }
  return spec::intern_layout(mesh, std::move(cuts));
}

at::Tensor shard_tensor(const at::Tensor& full, const spec::Mesh& mesh,
                        const std::vector<int>& dims) {
  return scatter_like(full, chunk_layout(mesh, dims, full.sizes()));
}

at::Tensor full_tensor(const at::Tensor& x) {
  return gather(x);
}
at::Tensor to_local(const at::Tensor& x) {
  return is_sharded(x) ? local(x) : x;
}

}  // namespace shardfield::tensor
