#include "shardfield/graph/pieces.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

#include "shardfield/graph/parallel.h"

namespace shardfield::graph {

namespace {

/// The lowest part among a point's cells; part 0 for points that no cell has.
std::vector<int32_t> point_owners(const Mesh& mesh, std::span<const int32_t> labels) {
  constexpr int32_t kNone = std::numeric_limits<int32_t>::max();
  std::vector<int32_t> owners(static_cast<size_t>(mesh.num_points()), kNone);
  mesh.for_each_cell(0, mesh.num_cells(), [&](int64_t cell, CellKind, auto nodes) {
    for (const int64_t node : nodes) {
      int32_t& owner = owners[static_cast<size_t>(node)];
      owner = std::min(owner, labels[static_cast<size_t>(cell)]);
    }
  });
  return owners;
}

/// Own rows first, then the others by (owner, number).
void sort_rows(std::vector<int64_t>& rows, std::span<const int32_t> owners, int64_t part) {
  std::sort(rows.begin(), rows.end(), [&](int64_t a, int64_t b) {
    const int32_t owner_a = owners[static_cast<size_t>(a)];
    const int32_t owner_b = owners[static_cast<size_t>(b)];
    if (owner_a != owner_b) {
      if (owner_a == part || owner_b == part) return owner_a == part;
      return owner_a < owner_b;
    }
    return a < b;
  });
}

std::vector<int32_t> pick(std::span<const int32_t> values, const std::vector<int64_t>& rows) {
  std::vector<int32_t> picked;
  picked.reserve(rows.size());
  for (const int64_t row : rows) picked.push_back(values[static_cast<size_t>(row)]);
  return picked;
}

/// Own cells, then ghosts, with the layer of each.
void set_cells(Piece& piece, std::span<const int64_t> own, const Ghosts& ghosts,
               std::span<const int32_t> labels) {
  piece.cells.assign(own.begin(), own.end());
  std::vector<size_t> order(ghosts.cells.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    const int32_t owner_a = labels[static_cast<size_t>(ghosts.cells[a])];
    const int32_t owner_b = labels[static_cast<size_t>(ghosts.cells[b])];
    return owner_a != owner_b ? owner_a < owner_b : ghosts.cells[a] < ghosts.cells[b];
  });
  piece.cell_layers.assign(own.size(), 0);
  for (const size_t i : order) {
    piece.cells.push_back(ghosts.cells[i]);
    piece.cell_layers.push_back(ghosts.layers[i]);
  }
  piece.cell_owners = pick(labels, piece.cells);
}

/// Points of the piece's cells (and those without cells, on part 0), and the cells in local
/// numbers. `local` is scratch memory, one -1 per point of the mesh before and after.
void set_points(const Mesh& mesh, Piece& piece, std::span<const int32_t> owners,
                std::span<const int64_t> loose_points, std::vector<int64_t>& local) {
  piece.offsets.assign(1, 0);
  for (const int64_t cell : piece.cells) {
    const auto nodes = mesh.nodes_of(cell);
    piece.kinds.push_back(static_cast<uint8_t>(mesh.kind_of(cell)));
    piece.nodes.insert(piece.nodes.end(), nodes.begin(), nodes.end());
    piece.offsets.push_back(static_cast<int64_t>(piece.nodes.size()));
    for (const int64_t node : nodes) {
      if (local[static_cast<size_t>(node)] != -1) continue;
      local[static_cast<size_t>(node)] = 0;
      piece.points.push_back(node);
    }
  }
  if (piece.part == 0) {
    piece.points.insert(piece.points.end(), loose_points.begin(), loose_points.end());
  }
  sort_rows(piece.points, owners, piece.part);
  for (size_t i = 0; i < piece.points.size(); ++i) {
    local[static_cast<size_t>(piece.points[i])] = static_cast<int64_t>(i);
  }
  for (int64_t& node : piece.nodes) node = local[static_cast<size_t>(node)];
  for (const int64_t point : piece.points) local[static_cast<size_t>(point)] = -1;
  piece.point_owners = pick(owners, piece.points);
}

/// @throws std::invalid_argument unless every row has an owner among the parts.
void check_rows(const std::vector<std::span<const int64_t>>& rows,
                std::span<const int32_t> owners) {
  check_labels(owners, static_cast<int64_t>(owners.size()), static_cast<int64_t>(rows.size()),
               "row");
  for (size_t part = 0; part < rows.size(); ++part) {
    for (const int64_t row : rows[part]) {
      if (row < 0 || row >= static_cast<int64_t>(owners.size())) {
        throw std::invalid_argument("partition: part " + std::to_string(part) + " holds row " +
                                    std::to_string(row) + "; expected 0 to " +
                                    std::to_string(owners.size()) + " (exclusive)");
      }
    }
  }
}

}  // namespace

void check_labels(std::span<const int32_t> labels, int64_t num_rows, int64_t num_parts,
                  const char* what) {
  if (static_cast<int64_t>(labels.size()) != num_rows) {
    throw std::invalid_argument("partition: expected one label per " + std::string(what) + ", " +
                                std::to_string(num_rows) + " in all, got " +
                                std::to_string(labels.size()));
  }
  for (size_t i = 0; i < labels.size(); ++i) {
    if (labels[i] < 0 || labels[i] >= num_parts) {
      throw std::invalid_argument("partition: " + std::string(what) + " " + std::to_string(i) +
                                  " has label " + std::to_string(labels[i]) + "; expected 0 to " +
                                  std::to_string(num_parts - 1));
    }
  }
}

std::vector<ExchangePlan> plan_exchanges(const std::vector<std::span<const int64_t>>& rows,
                                         std::span<const int32_t> owners) {
  check_rows(rows, owners);
  std::vector<int64_t> place(owners.size(), -1);  // local number of each row at its owner
  std::vector<ExchangePlan> plans(rows.size());
  for (size_t part = 0; part < rows.size(); ++part) {
    ExchangePlan& plan = plans[part];
    plan.num_rows = static_cast<int64_t>(rows[part].size());
    for (const int64_t row : rows[part]) {
      if (owners[static_cast<size_t>(row)] != static_cast<int32_t>(part)) break;
      place[static_cast<size_t>(row)] = plan.num_owned++;
    }
  }
  for (size_t part = 0; part < rows.size(); ++part) {
    ExchangePlan& plan = plans[part];
    for (int64_t i = plan.num_owned; i < plan.num_rows; ++i) {
      const int64_t row = rows[part][static_cast<size_t>(i)];
      const int64_t owner = owners[static_cast<size_t>(row)];
      if (owner == static_cast<int64_t>(part) || place[static_cast<size_t>(row)] < 0) {
        throw std::invalid_argument("partition: row " + std::to_string(row) + " of part " +
                                    std::to_string(part) +
                                    (owner == static_cast<int64_t>(part)
                                         ? " stands after its ghosts; expected own rows first"
                                         : " is a ghost that its owner, part " +
                                               std::to_string(owner) + ", does not hold"));
      }
      if (plan.receives.empty() || plan.receives.back().part != owner) {
        plan.receives.push_back({owner, i, 0});
        plans[static_cast<size_t>(owner)].sends.push_back({static_cast<int64_t>(part), {}});
      }
      ++plan.receives.back().count;
      plans[static_cast<size_t>(owner)].sends.back().rows.push_back(
          place[static_cast<size_t>(row)]);
    }
  }
  return plans;
}

std::vector<Piece> cut_into_pieces(const Mesh& mesh, std::span<const int32_t> labels,
                                   int64_t num_parts, const GhostRule& rule, int num_threads) {
  check_labels(labels, mesh.num_cells(), num_parts, "cell");
  const std::vector<Ghosts> ghosts = ghosts_of_parts(Neighbours(mesh, rule, num_threads), labels,
                                                     num_parts, rule.layers, num_threads);
  const Lists own = cells_of_parts(labels, num_parts);
  std::vector<int32_t> owners = point_owners(mesh, labels);
  std::vector<int64_t> loose_points;
  for (size_t p = 0; p < owners.size(); ++p) {
    if (owners[p] < num_parts) continue;
    owners[p] = 0;
    loose_points.push_back(static_cast<int64_t>(p));
  }
  std::vector<Piece> pieces(static_cast<size_t>(num_parts));
  std::vector<std::vector<int64_t>> scratch(static_cast<size_t>(thread_count(num_threads)));
  parallel_items(num_parts, num_threads, [&](int64_t part, int worker) {
    auto& local = scratch[static_cast<size_t>(worker)];
    local.resize(owners.size(), -1);
    Piece& piece = pieces[static_cast<size_t>(part)];
    piece.part = part;
    set_cells(piece, own[part], ghosts[static_cast<size_t>(part)], labels);
    set_points(mesh, piece, owners, loose_points, local);
  });
  std::vector<std::span<const int64_t>> cells;
  std::vector<std::span<const int64_t>> points;
  for (const Piece& piece : pieces) {
    cells.emplace_back(piece.cells);
    points.emplace_back(piece.points);
  }
  const std::vector<ExchangePlan> cell_plans = plan_exchanges(cells, labels);
  const std::vector<ExchangePlan> point_plans = plan_exchanges(points, owners);
  for (size_t part = 0; part < pieces.size(); ++part) {
    pieces[part].cell_exchange = cell_plans[part];
    pieces[part].point_exchange = point_plans[part];
  }
  return pieces;
}

}  // namespace shardfield::graph
