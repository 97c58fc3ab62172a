#pragma once

#include <string>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "shardfield/checkpoint/reader.h"

namespace shardfield::checkpoint {

/// This rank's box of a plain or sharded tensor. Local. @throws c10::Error when it is none.
Box box_of(const std::string& name, const at::Tensor& t);

/// Fills this rank's piece of a plain or sharded tensor with its range of a stored one, in place.
/// Local. @throws c10::Error when shape or dtype differ.
void read_into(Reader& reader, const std::string& name, at::Tensor target);

/// Fills parameters and buffers of a module, plain or sharded, from the names
/// "<prefix>/<parameter>" that Python's save_sharded({"model": net}) writes. Local.
void load_module(Reader& reader, torch::nn::Module& module, const std::string& prefix = "model");

}  // namespace shardfield::checkpoint
