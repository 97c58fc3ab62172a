#include "shardfield/checkpoint/load.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>

#include "shardfield/base/error.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/shard_tensor_impl.h"

namespace shardfield::checkpoint {

Box box_of(const std::string& name, const at::Tensor& t) {
  Box box = {std::vector<int64_t>(t.dim(), 0), t.sizes().vec()};
  if (!tensor::is_sharded(t)) return box;
  const spec::Layout& layout = tensor::layout_of(t);
  SHARDFIELD_CHECK(layout.has_single_cuts() && layout.is_simple(t.sizes().data()), kOp, "'", name,
                   "' is cut inside a merged dim; redistribute it to Shard placements first");
  for (size_t c = 0; c < layout.cuts().size(); ++c) {
    box.offset[layout.cuts()[c].dim] = layout.local_offset(c);
    box.shape[layout.cuts()[c].dim] = layout.local_size(c);
  }
  return box;
}

void read_into(Reader& reader, const std::string& name, at::Tensor target) {
  const c10::NoGradGuard no_grad;
  const StoredTensor& stored = reader.tensor(name);
  SHARDFIELD_CHECK(stored.dtype == target.scalar_type() && target.sizes() == stored.shape, kOp, "'",
                   name, "' is ", stored.dtype, " ", c10::IntArrayRef(stored.shape),
                   " in the checkpoint, expected ", target.scalar_type(), " ", target.sizes());
  if (!tensor::is_sharded(target)) {
    target.copy_(reader.read(name));
    return;
  }
  const Box box = box_of(name, target);
  tensor::local(target.detach()).copy_(reader.read(name, box));
}

void load_module(Reader& reader, torch::nn::Module& module, const std::string& prefix) {
  const std::string start = prefix.empty() ? "" : prefix + "/";
  for (const auto& entry : module.named_parameters())
    read_into(reader, start + entry.key(), entry.value());
  for (const auto& entry : module.named_buffers())
    read_into(reader, start + entry.key(), entry.value());
}

}  // namespace shardfield::checkpoint
