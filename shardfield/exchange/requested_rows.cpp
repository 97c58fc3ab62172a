#include "shardfield/exchange/requested_rows.h"

#include <ATen/ATen.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/exchange/cut_ranks.h"
#include "shardfield/exchange/exchange_node.h"

namespace shardfield::exchange {

namespace {

using at::Tensor;

Tensor empty_rows(const Tensor& like, int64_t dim, int64_t count) {
  auto sizes = like.sizes().vec();
  sizes[dim] = count;
  return at::empty(sizes, like.options());
}

}  // namespace

RequestedRows::RequestedRows(const spec::Layout& layout, size_t c, const Tensor& wanted)
    : mesh_(&layout.mesh()),
      dim_(layout.cuts()[c].dim),
      own_piece_(layout.piece(c)),
      own_rows_(layout.local_size(c)),
      peers_(ranks_along(layout, c)) {
  const at::NoGradGuard no_grad;
  const size_t pieces = peers_.size();
  Tensor unique;
  std::tie(unique, place_) = at::_unique(wanted, /*sorted=*/true, /*return_inverse=*/true);
  std::vector<int64_t> borders;
  borders.reserve(pieces);
  for (size_t p = 0; p < pieces; ++p) borders.push_back(layout.cuts()[c].offset(p));
  const Tensor begins =
      at::searchsorted(unique, at::tensor(borders, unique.options())).to(at::kCPU);
  begins_.assign(begins.const_data_ptr<int64_t>(), begins.const_data_ptr<int64_t>() + pieces);
  begins_.push_back(unique.numel());
  std::vector<int64_t> counts;
  counts.reserve(pieces);
  for (size_t p = 0; p < pieces; ++p) counts.push_back(begins_[p + 1] - begins_[p]);
  const auto all = comm::all_gather_ints(counts, *mesh_, wanted.device());

  asked_.resize(pieces);
  std::vector<comm::Message> sends, recvs;
  for (size_t p = 0; p < pieces; ++p) {
    const Tensor rows = part_of(unique, 0, p) - borders[p];
    if (p == own_piece_) {
      asked_[p] = rows;
      continue;
    }
    asked_[p] = at::empty({all[peers_[p]][own_piece_]}, unique.options());
    sends.push_back({peers_[p], rows});
    recvs.push_back({peers_[p], asked_[p]});
  }
  comm::start_exchange(*mesh_, std::move(sends), std::move(recvs)).wait();
}

Tensor RequestedRows::part_of(const Tensor& unique_rows, int64_t dim, size_t piece) const {
  return unique_rows.narrow(dim, begins_[piece], begins_[piece + 1] - begins_[piece]);
}

Tensor RequestedRows::forward(const Tensor& piece) const {
  std::vector<comm::Message> sends, recvs;
  std::vector<Tensor> parts(peers_.size());
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (p == own_piece_) continue;
    sends.push_back({peers_[p], piece.index_select(dim_, asked_[p])});
    parts[p] = empty_rows(piece, dim_, begins_[p + 1] - begins_[p]);
    recvs.push_back({peers_[p], parts[p]});
  }
  comm::Exchange transfer = comm::start_exchange(*mesh_, std::move(sends), std::move(recvs));
  parts[own_piece_] = piece.index_select(dim_, asked_[own_piece_]);
  transfer.wait();
  return at::cat(parts, dim_).index_select(dim_, place_);
}

Tensor RequestedRows::adjoint(const Tensor& rows) const {
  const Tensor unique =
      empty_rows(rows, dim_, begins_.back()).zero_().index_add_(dim_, place_, rows);
  std::vector<comm::Message> sends, recvs;
  std::vector<Tensor> parts(peers_.size());
  for (size_t p = 0; p < peers_.size(); ++p) {
    if (p == own_piece_) {
      parts[p] = part_of(unique, dim_, p);
      continue;
    }
    sends.push_back({peers_[p], part_of(unique, dim_, p)});
    parts[p] = empty_rows(rows, dim_, asked_[p].numel());
    recvs.push_back({peers_[p], parts[p]});
  }
  comm::start_exchange(*mesh_, std::move(sends), std::move(recvs)).wait();
  Tensor out = empty_rows(rows, dim_, own_rows_).zero_();
  for (size_t p = 0; p < peers_.size(); ++p) out.index_add_(dim_, asked_[p], parts[p]);
  return out;
}

namespace {

Tensor run(const Tensor& in, std::shared_ptr<const RequestedRows> exchange, bool adjoint) {
  if (comm::records_grad(in))
    return ExchangeFn<RequestedRows>::apply(in, std::move(exchange), adjoint);
  return adjoint ? exchange->adjoint(in) : exchange->forward(in);
}

}  // namespace

Tensor fetch_requested(const Tensor& piece, std::shared_ptr<const RequestedRows> exchange) {
  return run(piece, std::move(exchange), false);
}

Tensor add_requested(const Tensor& rows, std::shared_ptr<const RequestedRows> exchange) {
  return run(rows, std::move(exchange), true);
}

}  // namespace shardfield::exchange
