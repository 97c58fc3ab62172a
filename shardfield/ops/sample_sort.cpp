#include "shardfield/ops/sample_sort.h"

#include <cmath>
#include <optional>

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/exchange/cut_ranks.h"
#include "shardfield/exchange/exchange_node.h"
#include "shardfield/exchange/requested_rows.h"
#include "shardfield/tensor/autograd.h"

namespace shardfield::ops {

namespace {

using at::Tensor;
using exchange::RequestedRows;
using spec::Cut;
using spec::Layout;
using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// One element as the order sees it.
struct Key {
  at::Scalar value;
  int64_t index;
};

bool is_nan(const at::Scalar& s) {
  return s.isFloatingPoint() && std::isnan(s.toDouble());
}

/// -1, 0, 1 as a comes before, with or after b in ascending order; NaN last.
int compare(const at::Scalar& a, const at::Scalar& b) {
  const bool a_nan = is_nan(a), b_nan = is_nan(b);
  if (a_nan || b_nan) return static_cast<int>(a_nan) - static_cast<int>(b_nan);
  if (a.isFloatingPoint()) return (a.toDouble() > b.toDouble()) - (a.toDouble() < b.toDouble());
  return (a.toLong() > b.toLong()) - (a.toLong() < b.toLong());
}

bool precedes(const Key& a, const Key& b, bool descending) {
  const int order = descending ? compare(b.value, a.value) : compare(a.value, b.value);
  return order < 0 || (order == 0 && a.index < b.index);
}

/// A rank's elements in order: values and global indices.
struct Run {
  Tensor values, indices;

  int64_t size() const { return values.numel(); }
  Key key(int64_t i) const { return {values[i].item(), indices[i].item<int64_t>()}; }
  /// How many elements come before a key.
  int64_t rank_of(const Key& k, bool descending) const {
    int64_t begin = 0, end = size();
    while (begin < end) {
      const int64_t middle = begin + (end - begin) / 2;
      if (precedes(key(middle), k, descending)) {
        begin = middle + 1;
      } else {
        end = middle;
      }
    }
    return begin;
  }
};

Run sorted_run(const Tensor& values, const Tensor& indices, bool descending) {
  auto [in_order, places] = at::sort(values, /*stable=*/true, 0, descending);
  return {in_order, indices.index_select(0, places)};
}

/// Regular samples of every rank's run, all in order: the same on all ranks.
Run gathered_samples(const Run& own, const Layout& layout, bool descending) {
  const auto pieces = static_cast<int64_t>(layout.cuts()[0].sizes.size());
  const int64_t count = std::min(own.size(), pieces);
  const Tensor places =
      at::arange(count, at::kLong).mul_(own.size()).floor_divide_(std::max<int64_t>(count, 1));
  const Tensor at_places = places.to(own.values.device());
  Tensor values = at::zeros({pieces}, own.values.options());
  Tensor indices = at::full({pieces}, -1, own.indices.options());
  values.narrow(0, 0, count).copy_(own.values.index_select(0, at_places));
  indices.narrow(0, 0, count).copy_(own.indices.index_select(0, at_places));
  const auto& axes = layout.cuts()[0].axes;
  values = comm::all_gather(values, layout.mesh(), axes).flatten();
  indices = comm::all_gather(indices, layout.mesh(), axes).flatten();
  const Tensor given = indices.ge(0).nonzero().flatten();
  // Runs follow each other by piece, so equal values stay in order of their index.
  return sorted_run(values.index_select(0, given), indices.index_select(0, given), descending);
}

/// Where the run is cut so that piece p gets [places[p], places[p + 1]).
std::vector<int64_t> bucket_borders(const Run& own, const Run& samples, size_t pieces,
                                    bool descending) {
  std::vector<int64_t> borders{0};
  for (size_t p = 1; p < pieces; ++p) {
    const int64_t at = samples.size() * static_cast<int64_t>(p) / static_cast<int64_t>(pieces);
    borders.push_back(at < samples.size() ? own.rank_of(samples.key(at), descending) : own.size());
  }
  borders.push_back(own.size());
  return borders;
}

/// Every piece's bucket, each rank's part in order of pieces; the sizes of all buckets.
Run exchanged(const Run& own, const std::vector<int64_t>& borders, const Layout& layout,
              std::vector<int64_t>& bucket_sizes) {
  const spec::Mesh& mesh = layout.mesh();
  const std::vector<int> ranks = exchange::ranks_along(layout, 0);
  const size_t pieces = ranks.size();
  std::vector<int64_t> counts;
  for (size_t p = 0; p < pieces; ++p) counts.push_back(borders[p + 1] - borders[p]);
  const auto all = comm::all_gather_ints(counts, mesh, own.values.device());
  bucket_sizes.assign(pieces, 0);
  for (size_t p = 0; p < pieces; ++p)
    for (int r : ranks) bucket_sizes[p] += all[r][p];

  const auto mine = static_cast<size_t>(layout.piece(0));
  std::vector<comm::Message> sends, recvs;
  std::vector<Tensor> values(pieces), indices(pieces);
  for (size_t p = 0; p < pieces; ++p) {
    const Tensor v = own.values.narrow(0, borders[p], counts[p]);
    const Tensor i = own.indices.narrow(0, borders[p], counts[p]);
    if (p == mine) {
      values[p] = v;
      indices[p] = i;
      continue;
    }
    sends.push_back({ranks[p], v});
    sends.push_back({ranks[p], i});
    values[p] = at::empty({all[ranks[p]][mine]}, v.options());
    indices[p] = at::empty({all[ranks[p]][mine]}, i.options());
    recvs.push_back({ranks[p], values[p]});
    recvs.push_back({ranks[p], indices[p]});
  }
  comm::start_exchange(mesh, std::move(sends), std::move(recvs)).wait();
  return {at::cat(values), at::cat(indices)};
}

/// Rows whose values are known already; backward sends the gradients home.
struct KnownRowsFn : Function<KnownRowsFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& /*piece*/, const Tensor& values,
                        const std::shared_ptr<const RequestedRows>& plan) {
    comm::remember_scope(ctx);
    exchange::HeldExchange<RequestedRows>::save(ctx, plan);
    return values.detach();
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    return {exchange::add_requested(grads[0], exchange::HeldExchange<RequestedRows>::saved(ctx)),
            {},
            {}};
  }
};

}  // namespace

SortedVector sample_sort(const Tensor& x, bool descending) {
  const Layout& layout = tensor::layout_of(x);
  const Tensor piece = tensor::local(x);
  std::vector<int64_t> sizes;
  Run result;
  {
    const at::NoGradGuard no_grad;
    const Tensor values = piece.detach().contiguous();
    const int64_t begin = layout.local_offset(0);
    const Run own = sorted_run(
        values, at::arange(begin, begin + values.numel(), values.options().dtype(at::kLong)),
        descending);
    const Run samples = gathered_samples(own, layout, descending);
    const auto borders = bucket_borders(own, samples, layout.cuts()[0].sizes.size(), descending);
    const Run bucket = exchanged(own, borders, layout, sizes);
    result = sorted_run(bucket.values, bucket.indices, descending);
  }
  Tensor values = result.values;
  if (tensor::records_grad(piece)) {
    const auto plan = std::make_shared<const RequestedRows>(layout, 0, result.indices);
    values = KnownRowsFn::apply(piece, values, plan);
  }
  std::vector<Cut> cuts = layout.cuts();
  cuts[0].sizes = std::move(sizes);
  const Layout* buckets = spec::intern_layout(layout.mesh(), std::move(cuts));
  return {tensor::wrap(values, buckets, x.sizes()),
          tensor::make_sharded(result.indices, buckets, x.sizes())};
}

}  // namespace shardfield::ops
