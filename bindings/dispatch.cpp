#include "bindings/module.h"

#include "shardfield/dispatch/boxed.h"

namespace shardfield::bindings {

void bind_dispatch(pybind11::module_& m) {
  m.def("set_strict", &dispatch::set_strict);
  m.def("is_strict", &dispatch::is_strict);
}

}  // namespace shardfield::bindings
