// What a C++ user of the package writes: two ranks as threads, one sum over both.
#include <atomic>
#include <cstdio>

#include <ATen/ATen.h>

#include <shardfield/comm/in_process.h>

int main() {
  std::atomic<int> ranks{0};
  shardfield::comm::run_in_process(
      {2}, [&](const shardfield::spec::Mesh& mesh) { ranks += mesh.rank + 1; });
  const bool right = ranks == 3 && at::ones({2, 2}).sum().item<double>() == 4.0;
  std::printf("%s\n", right ? "consumer: passed" : "consumer: failed");
  return right ? 0 : 1;
}
