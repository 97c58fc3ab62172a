// The positive control of the thread sanitizer: two ranks write one variable. It runs as the tests
// run, through libtorch and Gloo, which are not instrumented; the report must come all the same.
#include <cstdio>

#include <ATen/ATen.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/comm/in_process.h"

int main() {
  int shared = 0;
  shardfield::comm::run_in_process({2}, [&](const shardfield::spec::Mesh& mesh) {
    for (int i = 0; i < 1000; ++i) ++shared;
    (void)shardfield::comm::all_reduce(at::ones({1}), mesh, {0});
    for (int i = 0; i < 1000; ++i) ++shared;
  });
  std::printf("%d\n", shared);
  return 0;
}
