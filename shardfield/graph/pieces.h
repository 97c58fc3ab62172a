#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "shardfield/graph/ghosts.h"
#include "shardfield/graph/mesh.h"

namespace shardfield::graph {

/// Rows that go to one other part, as local row numbers of the sender, ascending.
struct RowsTo {
  int64_t part = 0;
  std::vector<int64_t> rows;
};

/// Consecutive local rows that come from one other part, in the order in which it sends them.
struct RowsFrom {
  int64_t part = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

/// How ghost rows get the values of their owners: each part packs `sends`, and receives straight
/// into place. The adjoint runs it backwards: ghost rows go to the owner and are added there.
/// Sends and receives of all parts match in pairs.
struct ExchangePlan {
  int64_t num_owned = 0;           ///< Rows 0 .. num_owned - 1 are the part's own.
  int64_t num_rows = 0;            ///< Own rows and ghosts.
  std::vector<RowsTo> sends;       ///< By ascending part; only parts that get something.
  std::vector<RowsFrom> receives;  ///< By ascending part; they cover the ghost rows in order.
};

/// What one rank holds of a mesh. Local rows: own cells (ascending by global number), then ghosts
/// by (owner, global number); points likewise. The owner of a point is the lowest part among its
/// cells; points without cells belong to part 0.
struct Piece {
  int64_t part = 0;
  std::vector<int64_t> cells;        ///< Global number of each local cell.
  std::vector<int32_t> cell_owners;  ///< Part that owns it.
  std::vector<int32_t> cell_layers;  ///< 0 for own cells, else its ghost layer.
  std::vector<int64_t> points;       ///< Global number of each local point.
  std::vector<int32_t> point_owners;
  std::vector<uint8_t> kinds;    ///< CellKind of each local cell.
  std::vector<int64_t> offsets;  ///< Cell i has nodes[offsets[i]] .. nodes[offsets[i+1] - 1],
  std::vector<int64_t> nodes;    ///< which are local point numbers.
  ExchangePlan cell_exchange;
  ExchangePlan point_exchange;
};

/// Cuts a mesh into pieces with ghosts, owners, global numbers and exchange plans. Local; the same
/// for any number of threads.
///
/// @param labels  part of each cell
/// @throws std::invalid_argument when labels are not one per cell in 0 .. num_parts - 1; the
///   message names the cell.
///
/// Example: line cells 0-1, 1-2, 2-3 with labels 0, 0, 1 and one layer: piece 0 holds cells 0, 1
/// and ghost 2; piece 1 holds cell 2 and ghost 1; piece 0 sends local row 1 to piece 1.
[[nodiscard]] std::vector<Piece> cut_into_pieces(const Mesh& mesh, std::span<const int32_t> labels,
                                                 int64_t num_parts, const GhostRule& rule,
                                                 int num_threads);

/// The plans of all parts where part p holds `rows[p]`: own rows first, ghosts after by
/// (owner, number).
///
/// @param rows    global row numbers held by each part
/// @param owners  owner of every global row
/// @throws std::invalid_argument for a row or an owner out of range, a ghost before an own row, a
///   ghost that its owner does not hold
[[nodiscard]] std::vector<ExchangePlan> plan_exchanges(
    const std::vector<std::span<const int64_t>>& rows, std::span<const int32_t> owners);

/// @throws std::invalid_argument unless every label is one of the parts.
void check_labels(std::span<const int32_t> labels, int64_t num_rows, int64_t num_parts,
                  const char* what);

}  // namespace shardfield::graph
