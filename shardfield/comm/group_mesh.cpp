#include "shardfield/comm/group_mesh.h"

#include <mutex>

#include "shardfield/base/error.h"
#include "shardfield/comm/traffic.h"

namespace shardfield::comm {

Comm::Comm(c10::intrusive_ptr<c10d::Backend> backend, std::string name)
    : backend_(backend),
      name_(std::move(name)),
      rank_(backend->getRank()),
      size_(backend->getSize()) {}

c10::intrusive_ptr<c10d::Backend> Comm::backend(const char* op) const {
  auto live = backend_.lock();
  SHARDFIELD_CHECK(
      live, op, "the process group '", name_, "' (rank ", rank_, " of ", size_,
      ") has been destroyed; build a new mesh after init_process_group and scatter again");
  return live;
}

const spec::Mesh* make_mesh(std::vector<int64_t> shape, std::vector<std::string> axis_names,
                            int mesh_rank, c10::intrusive_ptr<c10d::Backend> whole,
                            std::vector<c10::intrusive_ptr<c10d::Backend>> axis) {
  auto* mesh = new GroupMesh();
  mesh->shape = std::move(shape);
  mesh->axis_names = std::move(axis_names);
  mesh->rank = mesh_rank;
  mesh->coord = mesh->coord_of(mesh_rank);
  mesh->context = current_context();
  SHARDFIELD_CHECK(whole->getSize() == mesh->size(), "make_mesh", "expected a group of ",
                   mesh->size(), " ranks for this mesh shape, got one of ", whole->getSize());
  SHARDFIELD_CHECK(whole->getRank() == mesh_rank, "make_mesh", "rank ", mesh_rank,
                   " of the mesh is rank ", whole->getRank(),
                   " of its group; order the group row-major");
  SHARDFIELD_CHECK(axis.size() == mesh->shape.size(), "make_mesh", "expected ", mesh->shape.size(),
                   " axis groups, got ", axis.size());
  mesh->whole = Comm(whole, "mesh");
  for (size_t a = 0; a < axis.size(); ++a) {
    SHARDFIELD_CHECK(axis[a]->getSize() == mesh->shape[a] && axis[a]->getRank() == mesh->coord[a],
                     "make_mesh", "axis ", a, ": expected size ", mesh->shape[a], " and rank ",
                     mesh->coord[a], ", got ", axis[a]->getSize(), " and ", axis[a]->getRank());
    const std::string name =
        a < mesh->axis_names.size() ? mesh->axis_names[a] : "axis " + std::to_string(a);
    mesh->axis.emplace_back(axis[a], name);
  }
  return mesh;
}

const spec::Mesh* make_mesh(const c10::intrusive_ptr<c10d::Backend>& group) {
  return make_mesh({group->getSize()}, {"domain"}, group->getRank(), group, {group});
}

c10::intrusive_ptr<c10d::Backend> backend_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group,
                                             c10::DeviceType device) {
  return group->getBackend(device);
}

}  // namespace shardfield::comm
