// What a C++ user of the package writes: a tensor cut over two ranks, which are threads here, goes
// through ordinary ATen calls, and its gradient comes back whole on each of them.
#include <cstdio>

#include <ATen/ATen.h>

#include <shardfield/shardfield.h>

int main() {
  const at::Tensor expected = at::tensor({0.0, 2.0, 2.0, 2.0, 2.0}, at::kDouble);
  int faults[2] = {1, 1};
  shardfield::run_in_process({2}, [&](const shardfield::Mesh& mesh) {
    const at::Tensor full = at::arange(5, at::kDouble).requires_grad_();
    const at::Tensor x = shardfield::shard_tensor(full, mesh, {0});
    const at::Tensor loss = (x * 2).relu().sum();
    loss.backward();
    const bool right = shardfield::is_sharded(x) && loss.item<double>() == 20.0 &&
                       at::equal(full.grad(), expected);
    faults[mesh.rank] = right ? 0 : 1;
  });
  const bool passed = faults[0] + faults[1] == 0;
  std::printf("consumer: %s\n", passed ? "passed" : "failed");
  return passed ? 0 : 1;
}
