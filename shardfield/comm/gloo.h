#pragma once

#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace shardfield::comm {

/// A Gloo group whose connections leave through the interface that `host` (this machine's name or
/// address) belongs to. Collective over the store's users.
c10::intrusive_ptr<c10d::Backend> make_gloo_on(const std::string& host,
                                               const c10::intrusive_ptr<c10d::Store>& store,
                                               int rank, int size,
                                               std::chrono::milliseconds timeout);

}  // namespace shardfield::comm
