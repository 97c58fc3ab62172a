// Microseconds an op costs over the plain op when called from C++, one rank, no Python.
//
// Figures are medians of interleaved blocks: plain and sharded calls alternate, so a machine that
// is busy for a while slows both. Read the differences and the ratio, not the absolute times.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <functional>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/Parallel.h>

#include "shardfield/shardfield.h"

namespace {

using at::Tensor;
using Clock = std::chrono::steady_clock;

double block_us(const std::function<void()>& call, int calls) {
  const auto start = Clock::now();
  for (int i = 0; i < calls; ++i) call();
  return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / calls;
}

double median(std::vector<double> v) {
  std::nth_element(v.begin(), v.begin() + v.size() / 2, v.end());
  return v[v.size() / 2];
}

struct Pair {
  double plain_us, sharded_us;
};

Pair medians_us(const std::function<void()>& plain, const std::function<void()>& sharded,
                int calls) {
  constexpr int repeats = 101;
  std::vector<double> a, b;
  for (int i = 0; i < repeats; ++i) {
    a.push_back(block_us(plain, calls));
    b.push_back(block_us(sharded, calls));
  }
  return {median(a), median(b)};
}

struct Case {
  const char* name;
  std::function<Tensor(const Tensor&)> call;
  bool image = false;
};

/// Convolution, norm and activation, four times.
struct SmallNet {
  std::vector<Tensor> weights;
  SmallNet() {
    for (int i = 0; i < 4; ++i) {
      weights.push_back((at::randn({8, 8, 3, 3}) / 8).set_requires_grad(true));
      weights.push_back(at::ones({8}).set_requires_grad(true));
    }
  }
  Tensor operator()(Tensor x) const {
    for (size_t i = 0; i < weights.size(); i += 2) {
      x = at::conv2d(x, weights[i], {}, 1, 1);
      x = at::gelu(at::group_norm(x, 2, weights[i + 1]));
    }
    return x.sum();
  }
};

void run(const shardfield::spec::Mesh& mesh) {
  const Tensor plain = at::randn({4, 8}), image = at::randn({1, 4, 16, 16});
  const Tensor sharded = shardfield::tensor::shard_tensor(plain, mesh, {0});
  const Tensor sharded_image = shardfield::tensor::shard_tensor(image, mesh, {2});
  const Tensor w = at::randn({8, 8}), b = at::randn({8}), k = at::randn({4, 4, 3, 3});
  const std::vector<Case> cases = {
      {"add", [](const Tensor& x) { return x + x; }},
      {"mul", [](const Tensor& x) { return x * 2.0; }},
      {"relu", [](const Tensor& x) { return at::relu(x); }},
      {"gelu", [](const Tensor& x) { return at::gelu(x); }},
      {"transpose", [](const Tensor& x) { return x.transpose(0, 1); }},
      {"view", [](const Tensor& x) { return x.view({4, 2, 4}); }},
      {"unsqueeze", [](const Tensor& x) { return x.unsqueeze(0); }},
      {"linear", [&](const Tensor& x) { return at::linear(x, w, b); }},
      {"layer_norm", [](const Tensor& x) { return at::layer_norm(x, {8}); }},
      {"mean", [](const Tensor& x) { return x.mean(); }},
      {"conv2d", [&](const Tensor& x) { return at::conv2d(x, k, {}, 1, 1); }, true},
  };
  std::printf("%-12s %9s %10s\n", "op", "plain us", "ours over");
  {
    const c10::AutoGradMode no_grad(false);
    for (const Case& c : cases) {
      const Tensor &p = c.image ? image : plain, &s = c.image ? sharded_image : sharded;
      const Pair t = medians_us([&] { c.call(p); }, [&] { c.call(s); }, 400);
      std::printf("%-12s %9.2f %10.2f\n", c.name, t.plain_us, t.sharded_us - t.plain_us);
    }
  }
  const SmallNet net;
  const Tensor batch = at::randn({2, 8, 32, 32});
  const Tensor sharded_batch = shardfield::tensor::shard_tensor(batch, mesh, {2});
  const Pair t =
      medians_us([&] { net(batch).backward(); }, [&] { net(sharded_batch).backward(); }, 5);
  std::printf("net forward+backward: %.0f us plain, ratio %.3f\n", t.plain_us,
              t.sharded_us / t.plain_us);
}

}  // namespace

int main() {
  at::set_num_threads(1);
  shardfield::comm::run_in_process({1}, run, std::chrono::minutes(10));
  return 0;
}
