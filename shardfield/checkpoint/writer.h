#pragma once

#include <cstdint>
#include <map>
#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "shardfield/spec/mesh.h"

namespace shardfield::checkpoint {

/// Tensors by name; "/" separates levels: "model/layer.weight".
using Tensors = std::map<std::string, at::Tensor>;

/// Parameters and buffers of a module as "<prefix>/<name>", as Python names them. Local.
Tensors tensors_of(const torch::nn::Module& module, const std::string& prefix = "model");

/// Saves plain tensors (equal on all ranks) and sharded ones in pieces, each byte written once by
/// one rank, as Python's save_sharded does and in its format. A checkpoint that is in the folder
/// stays whole until the new one is complete: new files are flushed, one rename of the index makes
/// them the checkpoint, the old ones are removed. Random generators are not saved. Collective over
/// the mesh.
/// @param folder    seen by all ranks; made when missing
/// @param integers  values of the top level, equal on all ranks: {"step", 100}
/// @throws c10::Error on every rank when names, shapes or values differ between ranks, a name is a
/// value and holds others ("a" beside "a/b"), pieces do not fit together, or a rank cannot write.
void save_sharded(const std::string& folder, const Tensors& tensors,
                  const std::map<std::string, int64_t>& integers, const spec::Mesh& mesh);

}  // namespace shardfield::checkpoint
