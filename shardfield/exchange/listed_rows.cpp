#include "shardfield/exchange/listed_rows.h"

#include <ATen/ATen.h>

#include "shardfield/base/error.h"
#include "shardfield/exchange/exchange_node.h"

namespace shardfield::exchange {

namespace {

using at::Tensor;

Tensor empty_rows(const Tensor& like, int64_t count) {
  auto sizes = like.sizes().vec();
  sizes[0] = count;
  return at::empty(sizes, like.options());
}

}  // namespace

ListedRows::ListedRows(const spec::Mesh& mesh, int axis, int64_t num_owned, int64_t num_rows,
                       std::vector<Send> sends, std::vector<Receive> receives)
    : mesh_(&mesh),
      axis_(axis),
      num_owned_(num_owned),
      num_rows_(num_rows),
      sends_(std::move(sends)),
      receives_(std::move(receives)) {
  const auto length = static_cast<int>(mesh.shape[static_cast<size_t>(axis)]);
  const auto check_peer = [&](int peer) {
    SHARDFIELD_CHECK(peer >= 0 && peer < length && peer != mesh.coord[static_cast<size_t>(axis)],
                     "fetch_rows", "expected peers 0 to ", length - 1, " on mesh axis ", axis,
                     " other than this rank's own, got ", peer);
  };
  for (const Send& send : sends_) check_peer(send.peer);
  int64_t covered = num_owned;
  for (const Receive& receive : receives_) {
    check_peer(receive.peer);
    SHARDFIELD_CHECK(receive.begin == covered && receive.count > 0, "fetch_rows",
                     "expected received rows to follow each other from row ", num_owned, ", got ",
                     receive.count, " rows at ", receive.begin, " from peer ", receive.peer);
    covered += receive.count;
  }
  SHARDFIELD_CHECK(covered == num_rows, "fetch_rows", "own and received rows make ", covered,
                   "; expected ", num_rows);
}

int ListedRows::rank_at(int coordinate) const {
  auto at = mesh_->coord;
  at[static_cast<size_t>(axis_)] = coordinate;
  return mesh_->rank_at(at);
}

void ListedRows::check(const Tensor& t, int64_t rows, const char* what) const {
  SHARDFIELD_CHECK(t.dim() > 0 && t.size(0) == rows, "fetch_rows", "expected ", rows, " ", what,
                   " in front, got shape ", t.sizes(), " on rank ", mesh_->rank,
                   "; pass this rank's rows in the order of its plan");
}

std::vector<comm::Message> ListedRows::pack(const Tensor& own) const {
  std::vector<comm::Message> sends;
  for (const Send& send : sends_) {
    sends.push_back({rank_at(send.peer), own.index_select(0, send.rows)});
  }
  return sends;
}

std::vector<comm::Message> ListedRows::places(const Tensor& copies) const {
  std::vector<comm::Message> recvs;
  for (const Receive& receive : receives_) {
    recvs.push_back(
        {rank_at(receive.peer), copies.narrow(0, receive.begin - num_owned_, receive.count)});
  }
  return recvs;
}

Tensor ListedRows::forward(const Tensor& own) const {
  check(own, num_owned_, "own rows");
  if (mesh_->shape[static_cast<size_t>(axis_)] == 1) return own;
  Tensor out = empty_rows(own, num_rows_);
  comm::Exchange transfer = comm::start_exchange(
      *mesh_, pack(own), places(out.narrow(0, num_owned_, num_rows_ - num_owned_)));
  out.narrow(0, 0, num_owned_).copy_(own);
  transfer.wait();
  return out;
}

std::shared_ptr<ListedRows::Pending> ListedRows::start(const Tensor& own) const {
  check(own, num_owned_, "own rows");
  auto pending = std::make_shared<Pending>();
  const at::NoGradGuard no_grad;
  pending->copies = empty_rows(own, num_rows_ - num_owned_);
  if (mesh_->shape[static_cast<size_t>(axis_)] > 1) {
    pending->transfer = comm::start_exchange(*mesh_, pack(own), places(pending->copies));
  }
  return pending;
}

Tensor ListedRows::finish(Pending& pending) const {
  pending.transfer.wait();
  return pending.copies;
}

Tensor ListedRows::adjoint(const Tensor& rows) const {
  check(rows, num_rows_, "own and received rows");
  if (mesh_->shape[static_cast<size_t>(axis_)] == 1) return rows;
  Tensor out = rows.narrow(0, 0, num_owned_).clone(at::MemoryFormat::Contiguous);
  add_copies(out, rows.narrow(0, num_owned_, num_rows_ - num_owned_));
  return out;
}

Tensor ListedRows::adjoint_of_copies(const Tensor& copies) const {
  check(copies, num_rows_ - num_owned_, "received rows");
  Tensor out = empty_rows(copies, num_owned_).zero_();
  if (mesh_->shape[static_cast<size_t>(axis_)] > 1) add_copies(out, copies);
  return out;
}

void ListedRows::add_copies(Tensor& own, const Tensor& copies) const {
  std::vector<comm::Message> recvs;
  for (const Send& send : sends_) {
    recvs.push_back({rank_at(send.peer), empty_rows(copies, send.rows.size(0))});
  }
  const std::vector<comm::Message> arriving = recvs;
  comm::start_exchange(*mesh_, places(copies.contiguous()), std::move(recvs)).wait();
  for (size_t i = 0; i < arriving.size(); ++i) {  // ascending peers: one order of sums
    own.index_add_(0, sends_[i].rows, arriving[i].data);
  }
}

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

/// The copies of an exchange that is on its way, or (pending empty) of one that runs at once.
struct CopiesFn : Function<CopiesFn> {
  static Tensor forward(AutogradContext* ctx, const Tensor& in,
                        std::shared_ptr<const ListedRows> exchange, bool adjoint,
                        const std::shared_ptr<ListedRows::Pending>& pending) {
    comm::remember_scope(ctx);
    const Tensor out = adjoint ? exchange->adjoint_of_copies(in)
                               : exchange->finish(pending ? *pending : *exchange->start(in));
    ctx->saved_data["adjoint"] = adjoint;
    HeldExchange<ListedRows>::save(ctx, std::move(exchange));
    return out;
  }
  static variable_list backward(AutogradContext* ctx, variable_list grads) {
    const comm::BackwardScope scope(ctx);
    const auto exchange = HeldExchange<ListedRows>::saved(ctx);
    const bool adjoint = !ctx->saved_data["adjoint"].toBool();
    if (comm::records_grad(grads[0])) {
      return {CopiesFn::apply(grads[0], exchange, adjoint, nullptr), {}, {}, {}};
    }
    return {adjoint ? exchange->adjoint_of_copies(grads[0])
                    : exchange->finish(*exchange->start(grads[0])),
            {},
            {},
            {}};
  }
};

}  // namespace

Tensor finish_rows(const Tensor& own, std::shared_ptr<const ListedRows> exchange,
                   const std::shared_ptr<ListedRows::Pending>& pending) {
  if (!comm::records_grad(own)) return exchange->finish(*pending);
  return CopiesFn::apply(own, std::move(exchange), false, pending);
}

Tensor fetch_rows(const Tensor& own, std::shared_ptr<const ListedRows> exchange) {
  if (!comm::records_grad(own)) return exchange->forward(own);
  return ExchangeFn<ListedRows>::apply(own, std::move(exchange), false);
}

Tensor return_rows(const Tensor& rows, std::shared_ptr<const ListedRows> exchange) {
  if (!comm::records_grad(rows)) return exchange->adjoint(rows);
  return ExchangeFn<ListedRows>::apply(rows, std::move(exchange), true);
}

}  // namespace shardfield::exchange
