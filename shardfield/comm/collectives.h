#pragma once

#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "shardfield/spec/mesh.h"

namespace shardfield::comm {

enum class Reduction { kSum, kProduct, kMin, kMax };

/// Reduces over the given mesh axes; the result is a fresh contiguous tensor, equal bit for bit on
/// all ranks. NaN wins in kMin and kMax on every rank; bool and half types are handled. Collective
/// over those axes. Not differentiable by itself (see tensor/autograd.h).
at::Tensor all_reduce(const at::Tensor& value, const spec::Mesh& mesh, const std::vector<int>& axes,
                      Reduction reduction = Reduction::kSum);

/// Every rank's `value` (same sizes and dtype everywhere) stacked along a new first dim: entry i is
/// from the i-th coordinate on `axes`, the first axis slowest. Collective over those axes. Not
/// differentiable.
at::Tensor all_gather(const at::Tensor& value, const spec::Mesh& mesh,
                      const std::vector<int>& axes);

struct Message {
  int peer = 0;  ///< mesh rank
  at::Tensor data;
};

/// Point-to-point transfers in flight. Every transfer ends in wait(), at the group's timeout at
/// the latest.
class [[nodiscard]] Exchange {
 public:
  Exchange() = default;
  Exchange(std::vector<c10::intrusive_ptr<c10d::Work>> work, std::vector<at::Tensor> keep,
           std::string context);
  Exchange(Exchange&&) = default;
  Exchange& operator=(Exchange&&) = default;
  Exchange(const Exchange&) = delete;
  Exchange& operator=(const Exchange&) = delete;
  ~Exchange();
  /// Blocks until all data has arrived; throws naming op and rank when a peer failed or timed out.
  void wait();

 private:
  std::vector<c10::intrusive_ptr<c10d::Work>> work_;
  std::vector<at::Tensor> keep_;  // buffers must outlive the transfers
  std::string context_;
};

/// Starts sends and receives between mesh ranks: one message per entry, empty ones are skipped on
/// both sides (sizes are known to both). Receive tensors must be contiguous and are written in
/// place; send tensors are made contiguous. Collective over the mesh ranks that name each other;
/// every rank of the mesh must call it, with empty lists if it has nothing to move.
Exchange start_exchange(const spec::Mesh& mesh, std::vector<Message> sends,
                        std::vector<Message> recvs);

/// Broadcast of `value` from one mesh rank into a fresh or given contiguous tensor. Collective
/// over the whole mesh.
void broadcast_(at::Tensor& value, const spec::Mesh& mesh, int source);

/// Every rank's int64 vector (same length everywhere), by mesh rank. Collective over the mesh.
std::vector<std::vector<int64_t>> all_gather_ints(const std::vector<int64_t>& mine,
                                                  const spec::Mesh& mesh, c10::Device device);

}  // namespace shardfield::comm
