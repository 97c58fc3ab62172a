#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/spec/layout.h"

namespace shardfield::exchange {

/// Rows of one cut dim that each rank asks for by its own list, which the others do not know: the
/// lists are sent to the owners first. A row asked for many times travels once. Stateless after
/// planning: buffers belong to each call.
///
/// Example: 5 rows cut 3 + 2; rank 0 asks for {4, 4, 0}, rank 1 for {1}: rank 0 gets row 4 once
/// from rank 1 and gives row 1 to it.
class RequestedRows {
 public:
  /// Plans by one gather of counts and one message of row numbers per pair of ranks that share
  /// rows. Collective over the layout's mesh.
  /// @param layout  layout of the pieces; its cut `c` must divide its whole dim
  /// @param wanted  int64 (n), global rows in range, repeats allowed
  RequestedRows(const spec::Layout& layout, size_t c, const at::Tensor& wanted);

  /// The wanted rows in their order along the cut dim. Collective over the cut's ranks.
  at::Tensor forward(const at::Tensor& piece) const;
  /// The transpose of forward: adds each row at its owner, ranks in order. Collective likewise.
  at::Tensor adjoint(const at::Tensor& rows) const;

 private:
  /// Those of the unique wanted rows that one piece owns.
  at::Tensor part_of(const at::Tensor& unique_rows, int64_t dim, size_t piece) const;

  const spec::Mesh* mesh_;
  int dim_;
  size_t own_piece_;
  int64_t own_rows_;
  std::vector<int> peers_;         ///< mesh rank of each piece
  std::vector<int64_t> begins_;    ///< where each owner's part of the unique rows begins
  at::Tensor place_;               ///< for each wanted row its place among the unique ones
  std::vector<at::Tensor> asked_;  ///< own rows that each piece's rank asks for
};

/// Differentiable RequestedRows::forward; any order of derivative. Collective.
at::Tensor fetch_requested(const at::Tensor& piece, std::shared_ptr<const RequestedRows> exchange);
/// Differentiable RequestedRows::adjoint: sums rows at their owners. Collective.
at::Tensor add_requested(const at::Tensor& rows, std::shared_ptr<const RequestedRows> exchange);

}  // namespace shardfield::exchange
