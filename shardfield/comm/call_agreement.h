#pragma once

#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/mesh.h"

namespace shardfield::comm {

/// One rank's view of a collective call, compared across the group before any data moves.
struct CollectiveCall {
  const char* op = "";
  std::optional<at::Tensor> tensor;  ///< absent on ranks that only receive
  bool records_grad = false;         ///< also true when some other tensor of the call does
  int64_t dim = 0;                   ///< the uneven dim; not compared between ranks' sizes
  int root = -1;
  std::vector<int64_t> sizes;     ///< arguments that must be equal on all ranks
  int64_t own_rows = 0;           ///< rows this rank holds along dim
  int64_t expected_rows = 0;      ///< rows the sizes promise for this rank
  std::string problem;            ///< what is wrong with this rank's arguments; empty when nothing
  c10::Device device = at::kCPU;  ///< where the comparison travels
};

/// What the ranks agreed on.
struct Agreement {
  bool records_grad = false;  ///< some rank records the call for backward, so all must
  at::ScalarType dtype = at::kFloat;
  std::vector<int64_t> other_sizes;  ///< sizes of the tensor; the entry of `dim` is 0
};

/// Why a tensor's elements cannot be moved as they lie in memory (sparse, nested, quantized,
/// without memory, more than 16 dims); empty when they can. Local.
std::string memory_problem(const at::Tensor& x);

/// Compares the call over the group: op, dtype, number of dims, dim, root, argument sizes and the
/// sizes of all other dims. One small all-reduce; collective over the group. With checks off, and
/// when every rank has a tensor, nothing is sent and only this rank's arguments are looked at.
/// @throws c10::Error on every rank alike, with this rank's problem or a table of what the ranks
/// passed.
Agreement agree_on_call(const CollectiveCall& call, const spec::Mesh& group);

/// `value`, made to require grad when any rank's does, so that all ranks take part in backward.
/// Collective where grad mode is on.
at::Tensor with_common_grad(const at::Tensor& value, const spec::Mesh& group);

/// Switches the comparison off (benchmarks, proven programs) or on (default). Per process.
void set_call_checks(bool on);
bool call_checks();

}  // namespace shardfield::comm
