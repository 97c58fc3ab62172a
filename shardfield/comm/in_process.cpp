#include "shardfield/comm/in_process.h"

#include <mutex>
#include <thread>

#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

namespace {

using Backend = c10::intrusive_ptr<c10d::Backend>;

struct Groups {
  Backend whole;
  std::vector<Backend> axis;
};

Groups make_groups(const c10::intrusive_ptr<c10d::Store>& store, const spec::Mesh& place,
                   std::chrono::milliseconds timeout) {
  const auto sub_store = [&](const std::string& name) {
    return c10::make_intrusive<c10d::PrefixStore>(name, store);
  };
  Groups groups;
  groups.whole = make_gloo(sub_store("whole"), place.rank, place.size(), timeout);
  for (int a = 0; a < place.num_axes(); ++a) {
    std::vector<int64_t> first = place.coord;
    first[a] = 0;
    const std::string name =
        "axis" + std::to_string(a) + "from" + std::to_string(place.rank_at(first));
    groups.axis.push_back(make_gloo(sub_store(name), static_cast<int>(place.coord[a]),
                                    static_cast<int>(place.shape[a]), timeout));
  }
  return groups;
}

}  // namespace

void run_in_process(const std::vector<int64_t>& shape,
                    const std::function<void(const spec::Mesh&)>& body,
                    std::chrono::milliseconds timeout, const std::vector<std::string>& axis_names) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  spec::Mesh places;
  places.shape = shape;
  std::mutex mutex;
  std::string first_error;
  std::vector<Groups> finished(static_cast<size_t>(places.size()));
  std::vector<const spec::Mesh*> meshes(finished.size(), nullptr);
  const auto run_rank = [&](int rank) {
    set_current_context(new_context());
    spec::Mesh place;
    place.shape = shape;
    place.rank = rank;
    place.coord = place.coord_of(rank);
    const auto slot = static_cast<size_t>(rank);
    try {
      Groups groups = make_groups(store, place, timeout);
      std::vector<Group> axis;
      for (const Backend& backend : groups.axis) axis.push_back({backend});
      meshes[slot] = make_mesh(shape, axis_names, rank, {groups.whole}, axis);
      axis.clear();
      body(*meshes[slot]);
      finished[slot] = std::move(groups);  // others may still be at work
    } catch (const std::exception& error) {
      // Nobody holds the groups now: peers waiting for this rank see the connection close.
      if (meshes[slot]) release_groups(*meshes[slot]);
      const std::lock_guard<std::mutex> lock(mutex);
      if (first_error.empty()) first_error = "rank " + std::to_string(rank) + ": " + error.what();
    }
  };
  std::vector<std::thread> threads;
  for (int r = 0; r < places.size(); ++r) threads.emplace_back(run_rank, r);
  for (auto& thread : threads) thread.join();
  for (const spec::Mesh* mesh : meshes)
    if (mesh) release_groups(*mesh);
  if (!first_error.empty()) throw std::runtime_error(first_error);
}

}  // namespace shardfield::comm
