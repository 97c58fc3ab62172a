#include "shardfield/ops/moments.h"

#include <algorithm>

#include <ATen/ATen.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/exchange/cut_ranks.h"
#include "shardfield/spec/range.h"

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

namespace {

/// Chan's combination along the first dim of `all`, (ranks, channels, 2): mean and variance, in
/// double. `share` is each rank's part of the rows.
Tensor combined(const Tensor& all, const Tensor& share) {
  const Tensor values = all.to(at::kDouble), means = values.select(2, 0);
  const Tensor weight = share.to(values.options()).unsqueeze(1);
  const Tensor mean = (means * weight).sum(0);
  const Tensor variance = ((values.select(2, 1) + (means - mean).square()) * weight).sum(0);
  return at::stack({mean, variance}, 1);
}

/// Every rank combines a part of the channels and sends it to the others: the bytes of an
/// all-reduce, which has no operator of this kind. `table` is (channels, 2).
Tensor combine_in_parts(const Tensor& table, const Tensor& share, const spec::Mesh& mesh,
                        const std::vector<int>& ranks) {
  const auto parts = static_cast<int64_t>(ranks.size());
  const auto channels = spec::ranges_of(spec::balanced_sizes(table.size(0), parts));
  const auto own = std::find(ranks.begin(), ranks.end(), mesh.rank) - ranks.begin();
  Tensor theirs = at::empty({parts, channels[own].size(), 2}, table.options());
  Tensor out = at::empty_like(table);
  const auto part_of = [&](const Tensor& t, int64_t i) {
    return t.narrow(0, channels[i].begin, channels[i].size());
  };
  theirs[own].copy_(part_of(table, own));
  std::vector<comm::Message> sends, recvs;
  for (int64_t i = 0; i < parts; ++i) {
    if (i == own) continue;
    sends.push_back({ranks[i], part_of(table, i)});
    recvs.push_back({ranks[i], theirs[i]});
  }
  comm::start_exchange(mesh, std::move(sends), std::move(recvs)).wait();
  part_of(out, own).copy_(combined(theirs, share));
  sends.clear();
  recvs.clear();
  for (int64_t i = 0; i < parts; ++i) {
    if (i == own) continue;
    sends.push_back({ranks[i], part_of(out, own)});
    recvs.push_back({ranks[i], part_of(out, i)});
  }
  comm::start_exchange(mesh, std::move(sends), std::move(recvs)).wait();
  return out;
}

}  // namespace

Moments combine_moments(const Moments& own, const std::vector<double>& counts,
                        const spec::Mesh& mesh, const std::vector<int>& axes) {
  if (axes.empty()) return own;
  const auto type = own.mean.scalar_type();
  double total = 0;
  for (double n : counts) total += n;
  std::vector<double> parts(counts);
  for (double& n : parts) n /= total;
  const Tensor share = at::tensor(parts, at::kDouble);
  const Tensor table = at::stack({own.mean, own.variance}, 1);
  const std::vector<int> ranks = exchange::ranks_over(mesh, axes);
  // Two ranks, or channels too few to share out: one round sends no more bytes than two.
  const bool one_round = ranks.size() == 2 || table.size(0) < static_cast<int64_t>(ranks.size());
  const Tensor all = one_round ? combined(comm::all_gather(table, mesh, axes), share)
                               : combine_in_parts(table, share, mesh, ranks);
  return {all.select(1, 0).to(type).contiguous(), all.select(1, 1).to(type).contiguous()};
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
