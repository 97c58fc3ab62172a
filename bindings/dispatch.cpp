#include "bindings/module.h"

#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/op_table.h"

namespace shardfield::bindings {

void bind_dispatch(pybind11::module_& m) {
  m.def("set_strict", &dispatch::set_strict);
  m.def("is_strict", &dispatch::is_strict);
  m.def("cover_late_ops", &dispatch::cover_late_ops);
}

}  // namespace shardfield::bindings
