#pragma once

#include <memory>

#include <ATen/core/Tensor.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/spec/layout.h"
#include "shardfield/spec/rows.h"

namespace shardfield::exchange {

/// Rows of one cut dim on the move: each rank gets the global rows its plan wants, in order. One
/// message per pair of ranks that share rows. Stateless: buffers belong to each call.
class RowExchange {
 public:
  /// @param layout  layout of the pieces; its cut `c` must divide its whole dim
  /// @param wanted  for every piece of the cut, the rows it is to hold
  RowExchange(const spec::Layout& layout, size_t c, std::vector<std::vector<spec::Segment>> wanted);

  /// Rows this rank is to hold. Collective over the cut's ranks.
  at::Tensor forward(const at::Tensor& piece) const;
  /// The transpose of forward: adds each row's gradient at its owner. Collective likewise.
  at::Tensor adjoint(const at::Tensor& rows) const;

  int dim() const { return dim_; }
  int64_t own_rows() const { return own_rows_; }
  int64_t wanted_rows() const { return messages_.num_wanted; }
  /// Rows this rank sends in forward.
  int64_t rows_sent() const { return messages_.rows_sent(); }

 private:
  std::vector<int> peers_of(const spec::Layout& layout, size_t c) const;

  const spec::Mesh* mesh_;
  int dim_;
  int64_t own_rows_;
  bool identity_;
  std::vector<int> mesh_rank_;  ///< mesh rank of each piece of the cut
  spec::RowMessages messages_;
};

/// The exchange for these wanted rows, planned once per layout (plans are kept for the life of the
/// process). Local.
std::shared_ptr<const RowExchange> row_exchange(const spec::Layout& layout, size_t c,
                                                std::vector<std::vector<spec::Segment>> wanted);
/// As above where each piece needs one range: halos.
std::shared_ptr<const RowExchange> row_exchange(const spec::Layout& layout, size_t c,
                                                const std::vector<spec::Range>& needed);

/// Differentiable RowExchange on this rank's piece; any order of derivative. Collective.
at::Tensor exchange_rows(const at::Tensor& piece, std::shared_ptr<const RowExchange> exchange);

}  // namespace shardfield::exchange
