#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

namespace shardfield::bindings {

void bind_comm(pybind11::module_& m);
void bind_tensor(pybind11::module_& m);
void bind_dispatch(pybind11::module_& m);
void bind_exchange(pybind11::module_& m);
void bind_points(pybind11::module_& m);
void bind_graph(pybind11::module_& m);
void bind_distributed(pybind11::module_& m);
void bind_checkpoint(pybind11::module_& m);

using NoGil = pybind11::call_guard<pybind11::gil_scoped_release>;

}  // namespace shardfield::bindings
