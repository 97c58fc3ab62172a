#include "bindings/module.h"

#include "shardfield/base/error.h"
#include "shardfield/exchange/rows.h"

namespace shardfield::bindings {

namespace py = pybind11;
using at::Tensor;

namespace {

using SegmentTuple = std::tuple<int64_t, int64_t, int64_t>;

/// Rows of the ranks' own pieces: each rank along `axis` gets the global rows it wants.
Tensor exchange_rows(const Tensor& piece, const spec::Mesh& mesh, int axis, int dim,
                     std::vector<int64_t> sizes,
                     const std::vector<std::vector<SegmentTuple>>& wanted) {
  const auto ranks = static_cast<size_t>(mesh.shape[axis]);
  SHARDFIELD_CHECK(sizes.size() == ranks && wanted.size() == ranks, "exchange_rows",
                   "expected the rows of ", ranks, " ranks, got ", sizes.size(), " on rank ",
                   mesh.rank);
  std::vector<std::vector<spec::Segment>> segments;
  for (const auto& rows : wanted) {
    auto& own = segments.emplace_back();
    for (const auto& [start, count, step] : rows) own.push_back({start, count, step});
  }
  const auto* layout = spec::intern_layout(mesh, {{dim, {axis}, std::move(sizes)}});
  return exchange::exchange_rows(piece, exchange::row_exchange(*layout, 0, std::move(segments)));
}

}  // namespace

void bind_exchange(py::module_& m) {
  m.def("exchange_rows", &exchange_rows, NoGil());
}

}  // namespace shardfield::bindings
