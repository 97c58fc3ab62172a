#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "fuzz/targets.h"

#include "shardfield/graph/adjacency.h"
#include "shardfield/graph/mesh.h"
#include "shardfield/graph/pieces.h"

namespace shardfield::fuzz {

namespace {

using graph::Array;
using graph::CellBlock;
using graph::CellKind;

/// Takes numbers off the bytes; zeros after their end.
class Numbers {
 public:
  explicit Numbers(Bytes bytes) : bytes_(bytes) {}

  uint8_t byte() {
    if (bytes_.empty()) return 0;
    const uint8_t first = bytes_.front();
    bytes_ = bytes_.subspan(1);
    return first;
  }
  /// A small number of either sign; the two ends of a byte stand for those of 64 bits.
  int64_t number() {
    const auto small = static_cast<int8_t>(byte());
    if (small == std::numeric_limits<int8_t>::max()) return std::numeric_limits<int64_t>::max();
    if (small == std::numeric_limits<int8_t>::min()) return std::numeric_limits<int64_t>::min();
    return small;
  }
  std::vector<int64_t> list(int count) {
    std::vector<int64_t> out;
    for (int i = 0; i < count; ++i) out.push_back(number());
    return out;
  }

 private:
  Bytes bytes_;
};

CellBlock block_of(Numbers& from) {
  const int form = from.byte() % 3;
  const auto kind = static_cast<CellKind>(from.byte());
  const int num_nodes = from.byte();
  const int num_cells = from.byte();
  const auto nodes = Array<int64_t>::owning(from.list(num_nodes));
  if (form == 0) return CellBlock::uniform(kind, nodes);
  const auto offsets = Array<int64_t>::owning(from.list(num_cells + 1));
  if (form == 1) return CellBlock::ragged(kind, nodes, offsets);
  std::vector<uint8_t> kinds;
  for (int i = 0; i < num_cells; ++i) kinds.push_back(from.byte());
  return CellBlock::mixed(Array<uint8_t>::owning(kinds), nodes, offsets);
}

void require(bool good) {
  if (!good) std::abort();
}

}  // namespace

bool mesh_arrays(Bytes bytes) {
  Numbers from(bytes);
  try {
    const int dim = from.byte();
    std::vector<double> points(from.byte());
    for (size_t i = 0; i < points.size(); ++i) points[i] = static_cast<double>(i * i % 17);
    const int num_blocks = from.byte() % 4;
    std::vector<CellBlock> blocks;
    for (int b = 0; b < num_blocks; ++b) blocks.push_back(block_of(from));
    const graph::Mesh mesh(Array<double>::owning(points), dim, blocks);
    require(mesh.centroids(1).size() == 3 * static_cast<size_t>(mesh.num_cells()));
    require(graph::cells_across_facets(mesh, 1).num_rows() == mesh.num_cells());
    std::vector<int32_t> labels;
    for (int64_t cell = 0; cell < mesh.num_cells(); ++cell)
      labels.push_back(static_cast<int32_t>(cell % 2));
    int64_t owned = 0;
    for (const graph::Piece& piece : graph::cut_into_pieces(mesh, labels, 2, {}, 1))
      owned += piece.cell_exchange.num_owned;
    require(owned == mesh.num_cells());
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}

bool piece_rows(Bytes bytes) {
  Numbers from(bytes);
  const int num_parts = from.byte() % 5;
  std::vector<std::vector<int64_t>> rows;
  for (int p = 0; p < num_parts; ++p) rows.push_back(from.list(from.byte() % 16));
  std::vector<int32_t> owners;
  for (int i = from.byte() % 32; i > 0; --i) owners.push_back(static_cast<int8_t>(from.byte()));
  const std::vector<std::span<const int64_t>> views(rows.begin(), rows.end());
  try {
    const auto plans = graph::plan_exchanges(views, owners);
    for (const graph::ExchangePlan& plan : plans) {
      int64_t ghosts = 0;
      for (const graph::RowsFrom& receive : plan.receives) ghosts += receive.count;
      require(plan.num_owned + ghosts == plan.num_rows);
      for (const graph::RowsTo& send : plan.sends)
        for (const int64_t row : send.rows) require(row >= 0 && row < plan.num_owned);
    }
  } catch (const std::invalid_argument&) {
    return false;
  }
  return true;
}

}  // namespace shardfield::fuzz
