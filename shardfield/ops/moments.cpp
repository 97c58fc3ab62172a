#include "shardfield/ops/moments.h"

#include <ATen/ATen.h>

#include "shardfield/comm/collectives.h"

namespace shardfield::ops {

using at::Tensor;

Moments local_moments(const Tensor& rows) {
  const auto type = accumulate_type(rows.scalar_type());
  if (rows.numel() == 0) {
    const auto options = rows.options().dtype(type);
    return {at::zeros({rows.size(1)}, options), at::zeros({rows.size(1)}, options)};
  }
  // PyTorch's own batch norm statistics: one pass, Welford or two-pass inside.
  auto [mean, variance] = at::batch_norm_update_stats(rows.to(type), {}, {}, 0.0);
  return {mean, variance};
}

Moments combine_moments(const Moments& own, const std::vector<double>& counts,
                        const spec::Mesh& mesh, const std::vector<int>& axes) {
  if (axes.empty()) return own;
  const auto type = own.mean.scalar_type();
  const Tensor all =
      comm::all_gather(at::stack({own.mean, own.variance}), mesh, axes).to(at::kDouble);
  double total = 0;
  for (double n : counts) total += n;
  std::vector<double> share(counts);
  for (double& n : share) n /= total;
  const Tensor weight = at::tensor(share, at::kDouble).to(all.options()).unsqueeze(1);
  const Tensor means = all.select(1, 0);
  const Tensor mean = (means * weight).sum(0);
  const Tensor variance = ((all.select(1, 1) + (means - mean).square()) * weight).sum(0);
  return {mean.to(type), variance.to(type)};
}

std::vector<double> counts_along(const spec::Layout& layout, at::IntArrayRef sizes,
                                 const std::vector<bool>& reduced, const std::vector<int>& axes) {
  const spec::Mesh& mesh = layout.mesh();
  std::vector<double> counts;
  std::vector<int64_t> coord = mesh.coord;
  for (int a : axes) coord[a] = 0;
  while (true) {
    const auto local = layout.local_sizes_at(sizes.data(), static_cast<int>(sizes.size()), coord);
    double n = 1;
    for (size_t d = 0; d < local.size(); ++d)
      if (reduced[d]) n *= static_cast<double>(local[d]);
    counts.push_back(n);
    auto a = axes.rbegin();
    while (a != axes.rend() && ++coord[*a] == mesh.shape[*a]) coord[*a++] = 0;
    if (a == axes.rend()) return counts;
  }
}

Tensor apply_moments(const Tensor& rows, const Tensor& mean, const Tensor& variance, double eps,
                     const Tensor& weight, const Tensor& bias) {
  if (rows.numel() == 0) return at::empty_like(rows);
  const auto as_mean = [&](const Tensor& t) { return t.defined() ? t.to(mean.scalar_type()) : t; };
  return std::get<0>(
      at::native_batch_norm(rows, as_mean(weight), as_mean(bias), mean, variance, false, 0.0, eps));
}

Tensor gradient_sums(const Tensor& dy, const Tensor& rows, const Tensor& mean,
                     const Tensor& inverse_std) {
  if (rows.numel() == 0) return at::zeros({2, rows.size(1)}, mean.options());
  // Batch norm's evaluation gradients of weight and bias are these sums, in one pass.
  const Tensor variance = inverse_std.square().reciprocal();
  auto sums = at::native_batch_norm_backward(dy, rows, at::ones_like(mean), mean, variance, {}, {},
                                             false, 0.0, {false, true, true});
  return at::stack({std::get<2>(sums), std::get<1>(sums)});
}

}  // namespace shardfield::ops
