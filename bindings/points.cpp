#include "bindings/module.h"

#include "shardfield/points/search.h"

namespace shardfield::bindings {

namespace py = pybind11;
using at::Tensor;

namespace {

std::tuple<Tensor, Tensor> knn(const Tensor& points, const Tensor& queries, int64_t k) {
  const auto found = points::knn(points, queries, k);
  return {found.indices, found.distances};
}

std::tuple<Tensor, std::optional<Tensor>, std::optional<Tensor>> radius_search(
    const Tensor& points, const Tensor& queries, double radius, std::optional<int64_t> max_points,
    bool return_points, bool return_distances) {
  const auto found =
      points::radius_search(points, queries, radius, {max_points, return_points, return_distances});
  const auto given = [](const Tensor& t) { return t.defined() ? std::optional(t) : std::nullopt; };
  return {found.indices, given(found.points), given(found.distances)};
}

}  // namespace

void bind_points(py::module_& m) {
  m.def("knn", &knn, NoGil());
  m.def("radius_search", &radius_search, NoGil());
}

}  // namespace shardfield::bindings
