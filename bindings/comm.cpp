#include "bindings/module.h"

#include "shardfield/comm/collectives.h"
#include "shardfield/comm/group_mesh.h"
#include "shardfield/comm/traffic.h"
#include "shardfield/spec/range.h"

namespace shardfield::bindings {

namespace py = pybind11;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

namespace {

const spec::Mesh* make_mesh(std::vector<int64_t> shape, std::vector<std::string> names,
                            int mesh_rank, const GroupPtr& whole, const std::vector<GroupPtr>& axis,
                            const std::string& device) {
  const auto type = c10::Device(device).type();
  std::vector<comm::Group> axis_groups;
  for (const GroupPtr& group : axis) axis_groups.push_back(comm::group_of(group, type));
  return comm::make_mesh(std::move(shape), std::move(names), mesh_rank, comm::group_of(whole, type),
                         axis_groups);
}

py::dict rows_of(const comm::Record& record) {
  py::dict rows;
  for (const auto& [key, t] : record.rows)
    rows[py::make_tuple(key.first, key.second)] =
        py::make_tuple(t.calls, t.bytes_sent, t.messages, t.fallbacks);
  return rows;
}

}  // namespace

void bind_comm(py::module_& m) {
  py::class_<spec::Mesh, std::unique_ptr<spec::Mesh, py::nodelete>>(m, "Mesh")
      .def_readonly("shape", &spec::Mesh::shape)
      .def_readonly("axis_names", &spec::Mesh::axis_names)
      .def_readonly("coord", &spec::Mesh::coord)
      .def_readonly("rank", &spec::Mesh::rank)
      .def("size", &spec::Mesh::size)
      .def_property_readonly(
          "id", [](const spec::Mesh& mesh) { return reinterpret_cast<int64_t>(&mesh); });
  m.def("make_mesh", &make_mesh, py::return_value_policy::reference);
  m.def("all_gather_ints", &comm::all_gather_ints, NoGil());
  m.def(
      "broadcast_",
      [](at::Tensor value, const spec::Mesh& mesh, int source) {
        comm::broadcast_(value, mesh, source);
      },
      NoGil());
  m.def("chunk_sizes", &spec::chunk_sizes);
  m.def("blockwise_sizes", &spec::blockwise_sizes);
  py::class_<comm::Record, std::shared_ptr<comm::Record>>(m, "Record").def("rows", &rows_of);
  m.def("start_recording", &comm::start_recording);
  m.def("stop_recording", &comm::stop_recording);
  m.def("intern_layer", &comm::intern_layer);
  m.def("current_layer", &comm::current_layer);
  m.def("set_current_layer", &comm::set_current_layer);
}

}  // namespace shardfield::bindings
