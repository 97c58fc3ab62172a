#include "shardfield/comm/group_mesh.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "shardfield/base/error.h"
#include "shardfield/comm/gloo.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

Comm::Comm(const Group& group, std::string name)
    : held_(group.registered_name.empty() ? group.backend : nullptr),
      address_(group.backend.get()),
      name_(std::move(name)),
      registered_name_(group.registered_name),
      device_(group.device),
      rank_(group.backend->getRank()),
      size_(group.backend->getSize()) {
  survive_closed_connections();
}

c10::intrusive_ptr<c10d::Backend> Comm::from_registry() const {
  try {
    auto found = c10d::resolve_process_group(registered_name_)->getBackend(device_);
    // A new group may have taken the name.
    return found.get() == address_ && found->getRank() == rank_ && found->getSize() == size_
               ? found
               : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

c10::intrusive_ptr<c10d::Backend> Comm::backend(const char* op) const {
  auto live = registered_name_.empty() ? held_ : from_registry();
  SHARDFIELD_CHECK(
      live, op, "the process group '", name_, "' (rank ", rank_, " of ", size_,
      ") has been destroyed; build a new mesh after init_process_group and scatter again");
  return live;
}

void release_groups(const spec::Mesh& mesh) {
  const GroupMesh& groups = groups_of(mesh);
  groups.whole.release();
  for (const Comm& group : groups.axis) group.release();
}

const spec::Mesh* make_mesh(std::vector<int64_t> shape, std::vector<std::string> axis_names,
                            int mesh_rank, const Group& whole, const std::vector<Group>& axis) {
  auto* mesh = new GroupMesh();
  mesh->shape = std::move(shape);
  mesh->axis_names = std::move(axis_names);
  mesh->rank = mesh_rank;
  mesh->coord = mesh->coord_of(mesh_rank);
  mesh->context = current_context();
  SHARDFIELD_CHECK(whole.backend->getSize() == mesh->size(), "make_mesh", "expected a group of ",
                   mesh->size(), " ranks for this mesh shape, got one of ",
                   whole.backend->getSize());
  SHARDFIELD_CHECK(whole.backend->getRank() == mesh_rank, "make_mesh", "rank ", mesh_rank,
                   " of the mesh is rank ", whole.backend->getRank(),
                   " of its group; order the group row-major");
  SHARDFIELD_CHECK(axis.size() == mesh->shape.size(), "make_mesh", "expected ", mesh->shape.size(),
                   " axis groups, got ", axis.size());
  mesh->whole = Comm(whole, "mesh");
  for (size_t a = 0; a < axis.size(); ++a) {
    SHARDFIELD_CHECK(axis[a].backend->getSize() == mesh->shape[a] &&
                         axis[a].backend->getRank() == mesh->coord[a],
                     "make_mesh", "axis ", a, ": expected size ", mesh->shape[a], " and rank ",
                     mesh->coord[a], ", got ", axis[a].backend->getSize(), " and ",
                     axis[a].backend->getRank());
    const std::string name =
        a < mesh->axis_names.size() ? mesh->axis_names[a] : "axis " + std::to_string(a);
    mesh->axis.emplace_back(axis[a], name);
  }
  return mesh;
}

const spec::Mesh* make_mesh(const c10::intrusive_ptr<c10d::Backend>& group) {
  return make_mesh({group->getSize()}, {"domain"}, group->getRank(), {group}, {{group}});
}

Group group_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device) {
  return {group->getBackend(device), group->getGroupName(), device};
}

}  // namespace shardfield::comm
