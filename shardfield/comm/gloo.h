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

/// Gloo writes to connections that a failed rank may have closed. SIGPIPE's default action would
/// end this process before the error can be raised, so it is ignored from then on, as Python does;
/// a handler of the program's own stays. Called for every group that this library makes or is
/// given. Local.
void survive_closed_connections();

}  // namespace shardfield::comm
