#pragma once

/// Shardfield: one sample on many devices, the torch::nn model unchanged.
///
///   comm::run_in_process or comm::make_mesh gives a mesh;
///   tensor::shard_tensor / scatter_from cut a sample over it;
///   the model runs as it is; tensor::full_tensor gathers what is wanted whole.

#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/in_process.h"
#include "shardfield/comm/traffic.h"
#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/dispatch/reproducible.h"
#include "shardfield/points/search.h"
#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/scatter.h"

namespace shardfield {

using comm::run_in_process;
using dispatch::is_reproducible;
using dispatch::set_reproducible;
using points::knn;
using points::radius_search;
using spec::Mesh;
using tensor::full_tensor;
using tensor::is_sharded;
using tensor::shard_tensor;
using tensor::to_local;

}  // namespace shardfield
