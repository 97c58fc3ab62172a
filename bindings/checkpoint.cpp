#include "bindings/module.h"

#include "shardfield/checkpoint/load.h"
#include "shardfield/checkpoint/reader.h"
#include "shardfield/checkpoint/sha256.h"
#include "shardfield/checkpoint/writer.h"

namespace shardfield::bindings {

namespace py = pybind11;
using Sizes = std::vector<int64_t>;

void bind_checkpoint(py::module_& m) {
  using checkpoint::Reader;
  py::class_<Reader>(m, "CheckpointReader")
      .def(py::init<const std::string&, bool>(), NoGil())
      .def("names",
           [](const Reader& reader) {
             std::vector<std::string> names;
             for (const auto& [name, unused] : reader.tensors()) names.push_back(name);
             return names;
           })
      .def("dtype",
           [](const Reader& reader, const std::string& n) { return reader.tensor(n).dtype; })
      .def("shape",
           [](const Reader& reader, const std::string& n) { return reader.tensor(n).shape; })
      .def(
          "read",
          [](Reader& reader, const std::string& name, const std::optional<Sizes>& offset,
             const Sizes& shape) {
            if (!offset) return reader.read(name);
            return reader.read(name, checkpoint::Box{*offset, shape});
          },
          NoGil())
      .def(
          "read_into",
          [](Reader& reader, const std::string& name, const at::Tensor& target) {
            checkpoint::read_into(reader, name, target);
          },
          NoGil())
      .def("integer", &Reader::integer)
      .def_property_readonly("save", &Reader::save)
      .def_property_readonly("structure", &Reader::structure)
      .def_property_readonly("metadata", &Reader::metadata)
      .def_property_readonly("bytes_read", &Reader::bytes_read);
  m.def("save_checkpoint", &checkpoint::save_sharded, NoGil());
  m.def("sha256", [](const py::bytes& data) {
    const auto text = static_cast<std::string>(data);
    return checkpoint::sha256(text.data(), text.size());
  });
}

}  // namespace shardfield::bindings
