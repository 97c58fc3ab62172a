#include "bindings/module.h"

#include "shardfield/tensor/autograd.h"
#include "shardfield/tensor/redistribute.h"
#include "shardfield/tensor/scatter.h"

namespace shardfield::bindings {

namespace py = pybind11;
using at::Tensor;

namespace {

using CutTuple = std::tuple<int, std::vector<int>, std::vector<int64_t>>;

const spec::Layout* layout_from(const spec::Mesh& mesh, const std::vector<CutTuple>& cuts) {
  std::vector<spec::Cut> list;
  for (const auto& [dim, axes, sizes] : cuts) list.push_back({dim, axes, sizes});
  return spec::intern_layout(mesh, std::move(list));
}

std::vector<CutTuple> cuts_of(const Tensor& x) {
  std::vector<CutTuple> cuts;
  for (const spec::Cut& c : tensor::layout_of(x).cuts()) cuts.emplace_back(c.dim, c.axes, c.sizes);
  return cuts;
}

}  // namespace

void bind_tensor(py::module_& m) {
  m.def("is_sharded", [](const Tensor& t) { return tensor::is_sharded(t); });
  m.def("wrap", [](const Tensor& piece, const spec::Mesh& mesh, const std::vector<CutTuple>& cuts,
                   const std::vector<int64_t>& sizes, bool channels_last) {
    const auto format = !channels_last      ? at::MemoryFormat::Contiguous
                        : sizes.size() == 5 ? at::MemoryFormat::ChannelsLast3d
                                            : at::MemoryFormat::ChannelsLast;
    return tensor::wrap(piece, layout_from(mesh, cuts), sizes, format);
  });
  m.def("local", [](const Tensor& x) { return tensor::local(x); });
  m.def("gather", [](const Tensor& x) { return tensor::gather(x); }, NoGil());
  m.def(
      "redistribute",
      [](const Tensor& x, const spec::Mesh& mesh, const std::vector<CutTuple>& cuts) {
        return tensor::redistribute(x, layout_from(mesh, cuts));
      },
      NoGil());
  m.def(
      "enter",
      [](const Tensor& t, const spec::Mesh& mesh, const std::vector<int>& axes) {
        return tensor::enter(t, mesh, axes);
      },
      NoGil());
  m.def(
      "reduce_sum",
      [](const Tensor& t, const spec::Mesh& mesh, const std::vector<int>& axes) {
        return tensor::reduce_sum(t, mesh, axes);
      },
      NoGil());
  m.def(
      "scatter_from",
      [](const std::optional<Tensor>& full, const spec::Mesh& mesh,
         const std::vector<CutTuple>& cuts, const std::vector<int64_t>& sizes, at::ScalarType dtype,
         int source) {
        return tensor::scatter_from(full, layout_from(mesh, cuts), sizes, dtype, source);
      },
      NoGil());
  m.def("cuts", &cuts_of);
  m.def(
      "mesh_of", [](const Tensor& x) -> const spec::Mesh& { return tensor::layout_of(x).mesh(); },
      py::return_value_policy::reference);
  m.def("offsets", [](const Tensor& x) {
    std::vector<int64_t> offsets(x.dim(), 0);
    const spec::Layout& layout = tensor::layout_of(x);
    for (size_t c = 0; c < layout.cuts().size(); ++c)
      offsets[layout.cuts()[c].dim] = layout.local_offset(c);
    return offsets;
  });
  m.def("describe", [](const Tensor& x) { return tensor::describe(x); });
  m.def("piece_shape", [](const Tensor& x) { return tensor::piece_of(x).sizes().vec(); });
}

}  // namespace shardfield::bindings
