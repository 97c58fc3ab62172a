#include "bindings/module.h"

#include "shardfield/dispatch/boxed.h"
#include "shardfield/dispatch/op_table.h"
#include "shardfield/dispatch/reproducible.h"

namespace shardfield::bindings {

void bind_dispatch(pybind11::module_& m) {
  m.def("set_strict", &dispatch::set_strict);
  m.def("is_strict", &dispatch::is_strict);
  m.def("set_reproducible", &dispatch::set_reproducible);
  m.def("is_reproducible", &dispatch::is_reproducible);
  m.def("cover_late_ops", &dispatch::cover_late_ops);
}

}  // namespace shardfield::bindings
