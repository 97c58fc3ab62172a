#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "shardfield/spec/mesh.h"

namespace shardfield::comm {

/// A Gloo group over loopback. Collective over the store's users.
c10::intrusive_ptr<c10d::Backend> make_gloo(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            int size, std::chrono::milliseconds timeout);

/// Runs `body(mesh)` on every rank of a mesh, ranks as threads of this process over a HashStore.
/// An exception on one rank drops its groups so that the others fail at once; the first one is
/// rethrown here with the rank in front. CPU only: two rank threads on one accelerator deadlock in
/// its engine thread.
/// @param shape  ranks per axis, e.g. {2, 2}
void run_in_process(const std::vector<int64_t>& shape,
                    const std::function<void(const spec::Mesh&)>& body,
                    std::chrono::milliseconds timeout = std::chrono::seconds(60),
                    const std::vector<std::string>& axis_names = {});

}  // namespace shardfield::comm
