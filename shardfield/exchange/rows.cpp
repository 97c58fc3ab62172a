#include "shardfield/exchange/rows.h"

#include <map>
#include <mutex>
#include <tuple>

#include <ATen/ATen.h>

#include "shardfield/exchange/cut_ranks.h"
#include "shardfield/exchange/exchange_node.h"

namespace shardfield::exchange {

namespace {

using at::Tensor;
using spec::Segment;

/// Rows of t in a segment's order; a view when the step is 1.
Tensor take(const Tensor& t, int dim, const Segment& s) {
  if (s.count == 0) return t.narrow(dim, 0, 0);
  if (s.step == 1) return t.narrow(dim, s.start, s.count);
  if (s.step > 1) return t.slice(dim, s.start, s.start + (s.count - 1) * s.step + 1, s.step);
  if (s.step == 0) {
    auto sizes = t.sizes().vec();
    sizes[dim] = s.count;
    return t.narrow(dim, s.start, 1).expand(sizes);
  }
  const int64_t last = s.start + (s.count - 1) * s.step;
  return t.slice(dim, last, s.start + 1, -s.step).flip(dim);
}

/// Adds rows into t at a segment's rows.
void add_to(Tensor& t, int dim, const Segment& s, const Tensor& rows) {
  if (s.count == 0) return;
  if (s.step == 0) {
    t.narrow(dim, s.start, 1).add_(rows.sum(dim, true));
  } else if (s.step > 0) {
    take(t, dim, s).add_(rows);
  } else {
    const int64_t last = s.start + (s.count - 1) * s.step;
    t.slice(dim, last, s.start + 1, -s.step).add_(rows.flip(dim));
  }
}

Tensor empty_rows(const Tensor& like, int dim, int64_t n) {
  auto sizes = like.sizes().vec();
  sizes[dim] = n;
  return at::empty(sizes, like.options());
}

Tensor packed(const Tensor& t, int dim, const std::vector<Segment>& segments) {
  if (segments.size() == 1) return take(t, dim, segments[0]).contiguous();
  std::vector<Tensor> parts;
  for (const Segment& s : segments) parts.push_back(take(t, dim, s));
  return at::cat(parts, dim);
}

}  // namespace

RowExchange::RowExchange(const spec::Layout& layout, size_t c,
                         std::vector<std::vector<Segment>> wanted)
    : mesh_(&layout.mesh()), dim_(layout.cuts()[c].dim), own_rows_(layout.local_size(c)) {
  const spec::Cut& cut = layout.cuts()[c];
  const spec::RowPlan plan{cut.sizes, std::move(wanted)};
  messages_ = spec::plan_messages(plan, layout.piece(c));
  mesh_rank_ = ranks_along(layout, c);
  identity_ = messages_.sends.empty() && messages_.receives.empty() &&
              messages_.copies.size() == 1 && messages_.num_wanted == own_rows_ &&
              messages_.copies[0].source == Segment{0, own_rows_, 1};
}

Tensor RowExchange::forward(const Tensor& piece) const {
  if (identity_) return piece;
  std::vector<comm::Message> sends, recvs;
  for (const auto& s : messages_.sends)
    sends.push_back({mesh_rank_[s.peer], packed(piece, dim_, s.rows)});
  for (const auto& r : messages_.receives)
    recvs.push_back({mesh_rank_[r.peer], empty_rows(piece, dim_, r.num_rows)});
  std::vector<comm::Message> arriving = recvs;
  comm::Exchange transfer = comm::start_exchange(*mesh_, std::move(sends), std::move(recvs));
  Tensor out = empty_rows(piece, dim_, messages_.num_wanted);
  for (const auto& c : messages_.copies)
    take(out, dim_, c.target).copy_(take(piece, dim_, c.source));
  transfer.wait();
  for (size_t i = 0; i < arriving.size(); ++i)
    for (const auto& place : messages_.receives[i].places)
      take(out, dim_, place.target).copy_(take(arriving[i].data, dim_, place.source));
  return out;
}

Tensor RowExchange::adjoint(const Tensor& rows) const {
  if (identity_) return rows;
  std::vector<comm::Message> sends, recvs;
  for (const auto& r : messages_.receives) {
    Tensor buffer = empty_rows(rows, dim_, r.num_rows).zero_();
    for (const auto& place : r.places)
      add_to(buffer, dim_, place.source, take(rows, dim_, place.target));
    sends.push_back({mesh_rank_[r.peer], buffer});
  }
  for (const auto& s : messages_.sends)
    recvs.push_back({mesh_rank_[s.peer], empty_rows(rows, dim_, s.num_rows)});
  std::vector<comm::Message> arriving = recvs;
  comm::Exchange transfer = comm::start_exchange(*mesh_, std::move(sends), std::move(recvs));
  Tensor out = empty_rows(rows, dim_, own_rows_).zero_();
  for (const auto& c : messages_.copies) add_to(out, dim_, c.source, take(rows, dim_, c.target));
  transfer.wait();
  for (size_t i = 0; i < arriving.size(); ++i) {
    int64_t at = 0;
    for (const Segment& s : messages_.sends[i].rows) {
      add_to(out, dim_, s, arriving[i].data.narrow(dim_, at, s.count));
      at += s.count;
    }
  }
  return out;
}

std::shared_ptr<const RowExchange> row_exchange(const spec::Layout& layout, size_t c,
                                                std::vector<std::vector<Segment>> wanted) {
  using Key = std::tuple<const spec::Layout*, size_t, std::vector<int64_t>>;
  Key key{&layout, c, {}};
  for (const auto& segments : wanted) {
    std::get<2>(key).push_back(static_cast<int64_t>(segments.size()));
    for (const Segment& s : segments)
      std::get<2>(key).insert(std::get<2>(key).end(), {s.start, s.count, s.step});
  }
  static auto* mutex = new std::mutex();
  static auto* plans = new std::map<Key, std::shared_ptr<const RowExchange>>();
  const std::lock_guard<std::mutex> lock(*mutex);
  auto& plan = (*plans)[std::move(key)];
  if (!plan) plan = std::make_shared<const RowExchange>(layout, c, std::move(wanted));
  return plan;
}

std::shared_ptr<const RowExchange> row_exchange(const spec::Layout& layout, size_t c,
                                                const std::vector<spec::Range>& needed) {
  std::vector<std::vector<Segment>> wanted;
  for (const spec::Range& r : needed) wanted.push_back({spec::segment_of(r)});
  return row_exchange(layout, c, std::move(wanted));
}

Tensor exchange_rows(const Tensor& piece, std::shared_ptr<const RowExchange> exchange) {
  if (!comm::records_grad(piece)) return exchange->forward(piece);
  return ExchangeFn<RowExchange>::apply(piece, std::move(exchange), false);
}

}  // namespace shardfield::exchange
