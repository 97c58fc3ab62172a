#include "shardfield/comm/group_mesh.h"

#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include "shardfield/base/error.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

namespace {

bool is_registered(const std::string& name) {
  try {
    return static_cast<bool>(c10d::resolve_process_group(name));
  } catch (const std::exception&) {
    return false;
  }
}

}  // namespace

Comm::Comm(c10::intrusive_ptr<c10d::Backend> backend, std::string name, std::string registered_name)
    : backend_(backend),
      name_(std::move(name)),
      registered_name_(std::move(registered_name)),
      rank_(backend->getRank()),
      size_(backend->getSize()) {}

c10::intrusive_ptr<c10d::Backend> Comm::backend(const char* op) const {
  auto live = backend_.lock();
  // Others may hold the backend of a group that was destroyed.
  const bool open = live && (registered_name_.empty() || is_registered(registered_name_));
  SHARDFIELD_CHECK(
      open, op, "the process group '", name_, "' (rank ", rank_, " of ", size_,
      ") has been destroyed; build a new mesh after init_process_group and scatter again");
  return live;
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
  mesh->whole = Comm(whole.backend, "mesh", whole.registered_name);
  for (size_t a = 0; a < axis.size(); ++a) {
    SHARDFIELD_CHECK(axis[a].backend->getSize() == mesh->shape[a] &&
                         axis[a].backend->getRank() == mesh->coord[a],
                     "make_mesh", "axis ", a, ": expected size ", mesh->shape[a], " and rank ",
                     mesh->coord[a], ", got ", axis[a].backend->getSize(), " and ",
                     axis[a].backend->getRank());
    const std::string name =
        a < mesh->axis_names.size() ? mesh->axis_names[a] : "axis " + std::to_string(a);
    mesh->axis.emplace_back(axis[a].backend, name, axis[a].registered_name);
  }
  return mesh;
}

const spec::Mesh* make_mesh(const c10::intrusive_ptr<c10d::Backend>& group) {
  return make_mesh({group->getSize()}, {"domain"}, group->getRank(), {group}, {{group}});
}

Group group_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device) {
  return {group->getBackend(device), group->getGroupName()};
}

}  // namespace shardfield::comm
