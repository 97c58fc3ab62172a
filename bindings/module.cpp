#include "bindings/module.h"

PYBIND11_MODULE(_shardfield, m) {
  m.doc() = "Raw bindings; use the shardfield package.";
  shardfield::bindings::bind_comm(m);
  shardfield::bindings::bind_tensor(m);
  shardfield::bindings::bind_dispatch(m);
  shardfield::bindings::bind_exchange(m);
  shardfield::bindings::bind_points(m);
  shardfield::bindings::bind_graph(m);
  shardfield::bindings::bind_distributed(m);
  shardfield::bindings::bind_checkpoint(m);
}
