#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/spec/mesh.h"

namespace shardfield::exchange {

/// Rows of dim 0 on the move by lists: each rank keeps its own rows and gets, behind them, copies
/// of rows that others own. For irregular halos (meshes, graphs); regular ones use RowExchange.
/// One message per pair of ranks that share rows, received in place. Stateless: buffers belong to
/// each call.
///
/// Example: rank 0 owns rows a, b, rank 1 owns c and wants b: rank 0 sends {1, {1}}, rank 1
/// receives {0, 1, 1}; forward gives a, b on rank 0 and c, b on rank 1, adjoint adds the second row
/// of rank 1 to b.
class ListedRows {
 public:
  struct Send {
    int peer = 0;     ///< Coordinate on the mesh axis.
    at::Tensor rows;  ///< int64, own rows to pack, each once.
  };
  struct Receive {
    int peer = 0;
    int64_t begin = 0;  ///< First of `count` consecutive rows of the result.
    int64_t count = 0;
  };

  /// Local. Sends and receives of all ranks along `axis` must match in pairs.
  ListedRows(const spec::Mesh& mesh, int axis, int64_t num_owned, int64_t num_rows,
             std::vector<Send> sends, std::vector<Receive> receives);

  /// (num_owned, ...) to (num_rows, ...). Collective over the mesh axis.
  at::Tensor forward(const at::Tensor& own) const;
  /// The transpose of forward: adds each copy's row at its owner. Collective likewise.
  at::Tensor adjoint(const at::Tensor& rows) const;

  /// Copies on their way: between start() and finish() a rank may work on its own rows.
  struct Pending {
    comm::Exchange transfer;
    at::Tensor copies;  ///< (num_rows - num_owned, ...), complete after the wait.
  };
  /// Packs and sends. Collective over the mesh axis; every start must be finished.
  std::shared_ptr<Pending> start(const at::Tensor& own) const;
  /// Waits for the copies alone, (num_rows - num_owned, ...). Local but for the wait.
  at::Tensor finish(Pending& pending) const;
  /// The transpose of start and finish: (num_rows - num_owned, ...) to (num_owned, ...), each
  /// copy's row added at its owner. Collective likewise.
  at::Tensor adjoint_of_copies(const at::Tensor& copies) const;

  int64_t num_owned() const { return num_owned_; }
  int64_t num_rows() const { return num_rows_; }

 private:
  int rank_at(int coordinate) const;
  std::vector<comm::Message> pack(const at::Tensor& own) const;
  /// Where rows arrive in (or leave from) a tensor of the copies alone.
  std::vector<comm::Message> places(const at::Tensor& copies) const;
  /// Sends the copies back and adds them to the own rows.
  void add_copies(at::Tensor& own, const at::Tensor& copies) const;
  void check(const at::Tensor& t, int64_t rows, const char* what) const;

  const spec::Mesh* mesh_;
  int axis_;
  int64_t num_owned_;
  int64_t num_rows_;
  std::vector<Send> sends_;
  std::vector<Receive> receives_;
};

/// Differentiable ListedRows::forward; any order of derivative. Collective.
at::Tensor fetch_rows(const at::Tensor& own, std::shared_ptr<const ListedRows> exchange);

/// Differentiable ListedRows::adjoint: copies go back and are added at their owners; any order of
/// derivative. Collective.
at::Tensor return_rows(const at::Tensor& rows, std::shared_ptr<const ListedRows> exchange);

/// Differentiable ListedRows::finish of an exchange started with the same `own`; the backward is
/// adjoint_of_copies, to any order. Collective in backward.
at::Tensor finish_rows(const at::Tensor& own, std::shared_ptr<const ListedRows> exchange,
                       const std::shared_ptr<ListedRows::Pending>& pending);

}  // namespace shardfield::exchange
