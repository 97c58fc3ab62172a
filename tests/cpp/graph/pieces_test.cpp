#include "shardfield/graph/pieces.h"

#include <map>
#include <random>
#include <set>
#include <stdexcept>

#include <gtest/gtest.h>

#include "graph/meshes.h"

#include "shardfield/graph/partition.h"

namespace shardfield::graph {
namespace {

std::vector<int32_t> random_labels(int64_t count, int64_t parts, int seed) {
  std::mt19937 draw(static_cast<uint32_t>(seed));
  std::vector<int32_t> labels(static_cast<size_t>(count));
  for (auto& label : labels) label = static_cast<int32_t>(draw() % static_cast<uint32_t>(parts));
  return labels;
}

/// Ghost layer of every cell that part `part` holds, straight from the definition.
std::map<int64_t, int32_t> slow_ghosts(const Lists& neighbours, const std::vector<int32_t>& labels,
                                       int32_t part, int64_t layers) {
  std::map<int64_t, int32_t> layer_of;
  for (size_t cell = 0; cell < labels.size(); ++cell) {
    if (labels[cell] == part) layer_of[static_cast<int64_t>(cell)] = 0;
  }
  for (int32_t layer = 1; layer <= layers; ++layer) {
    std::set<int64_t> next;
    for (const auto& [cell, at] : layer_of) {
      for (const int64_t other : neighbours[cell]) {
        if (!layer_of.contains(other)) next.insert(other);
      }
    }
    for (const int64_t cell : next) layer_of[cell] = layer;
  }
  return layer_of;
}

/// Plays an exchange on values per part: ghost rows take the value of their owner.
void play(const std::vector<ExchangePlan>& plans, std::vector<std::vector<double>>& values) {
  const auto sent = values;
  for (size_t part = 0; part < plans.size(); ++part) {
    for (const RowsFrom& from : plans[part].receives) {
      const ExchangePlan& owner = plans[static_cast<size_t>(from.part)];
      const auto send = std::find_if(owner.sends.begin(), owner.sends.end(), [&](const RowsTo& to) {
        return to.part == static_cast<int64_t>(part);
      });
      ASSERT_NE(send, owner.sends.end());
      ASSERT_EQ(static_cast<int64_t>(send->rows.size()), from.count);
      for (int64_t i = 0; i < from.count; ++i) {
        const int64_t row = send->rows[static_cast<size_t>(i)];
        ASSERT_LT(row, owner.num_owned);
        values[part][static_cast<size_t>(from.begin + i)] =
            sent[static_cast<size_t>(from.part)][static_cast<size_t>(row)];
      }
    }
  }
}

/// Own rows know their global number, ghosts nothing; after the exchange all must know theirs.
void check_exchange(const std::vector<ExchangePlan>& plans,
                    const std::vector<std::vector<int64_t>>& rows) {
  std::vector<std::vector<double>> values;
  int64_t messages_out = 0;
  int64_t messages_in = 0;
  for (size_t part = 0; part < plans.size(); ++part) {
    ASSERT_EQ(plans[part].num_rows, static_cast<int64_t>(rows[part].size()));
    values.emplace_back(rows[part].size(), -1);
    for (int64_t i = 0; i < plans[part].num_owned; ++i) {
      values[part][static_cast<size_t>(i)] =
          static_cast<double>(rows[part][static_cast<size_t>(i)]);
    }
    messages_out += static_cast<int64_t>(plans[part].sends.size());
    messages_in += static_cast<int64_t>(plans[part].receives.size());
  }
  EXPECT_EQ(messages_out, messages_in);
  play(plans, values);
  for (size_t part = 0; part < plans.size(); ++part) {
    EXPECT_EQ(values[part], std::vector<double>(rows[part].begin(), rows[part].end()));
  }
}

void check_pieces(const Mesh& mesh, const std::vector<int32_t>& labels, int64_t parts,
                  const GhostRule& rule) {
  const auto pieces = cut_into_pieces(mesh, labels, parts, rule, 1);
  const Lists neighbours = Neighbours(mesh, rule, 1).lists(1);
  std::vector<std::vector<int64_t>> cells;
  std::vector<std::vector<int64_t>> points;
  std::vector<ExchangePlan> cell_plans;
  std::vector<ExchangePlan> point_plans;
  std::vector<int> cell_count(static_cast<size_t>(mesh.num_cells()));
  std::vector<int> point_count(static_cast<size_t>(mesh.num_points()));
  ASSERT_EQ(static_cast<int64_t>(pieces.size()), parts);
  for (const Piece& piece : pieces) {
    const auto expected =
        slow_ghosts(neighbours, labels, static_cast<int32_t>(piece.part), rule.layers);
    ASSERT_EQ(piece.cells.size(), expected.size());
    for (size_t i = 0; i < piece.cells.size(); ++i) {
      const int64_t cell = piece.cells[i];
      ASSERT_TRUE(expected.contains(cell));
      EXPECT_EQ(piece.cell_layers[i], expected.at(cell));
      EXPECT_EQ(piece.cell_owners[i], labels[static_cast<size_t>(cell)]);
      EXPECT_EQ(piece.kinds[i], static_cast<uint8_t>(mesh.kind_of(cell)));
      const auto nodes = mesh.nodes_of(cell);
      ASSERT_EQ(static_cast<size_t>(piece.offsets[i + 1] - piece.offsets[i]), nodes.size());
      for (size_t n = 0; n < nodes.size(); ++n) {
        const int64_t local = piece.nodes[static_cast<size_t>(piece.offsets[i]) + n];
        EXPECT_EQ(piece.points.at(static_cast<size_t>(local)), nodes[n]);
      }
      const bool own = static_cast<int64_t>(i) < piece.cell_exchange.num_owned;
      EXPECT_EQ(own, piece.cell_layers[i] == 0);
      cell_count[static_cast<size_t>(cell)] += static_cast<int>(own);
    }
    for (int64_t i = 0; i < piece.point_exchange.num_owned; ++i) {
      EXPECT_EQ(piece.point_owners[static_cast<size_t>(i)], piece.part);
      ++point_count[static_cast<size_t>(piece.points[static_cast<size_t>(i)])];
    }
    cells.push_back(piece.cells);
    points.push_back(piece.points);
    cell_plans.push_back(piece.cell_exchange);
    point_plans.push_back(piece.point_exchange);
  }
  EXPECT_EQ(cell_count, std::vector<int>(cell_count.size(), 1));
  EXPECT_EQ(point_count, std::vector<int>(point_count.size(), 1));
  check_exchange(cell_plans, cells);
  check_exchange(point_plans, points);
}

TEST(Pieces, EqualTheDefinitionForEveryRule) {
  for (const Mesh& mesh : {box_of_cubes(4, 3, 5), box_of_tetrahedra(3, 2, 2), row_of_lines(11)}) {
    for (const int64_t parts : {1, 2, 5}) {
      for (const int64_t layers : {0, 1, 2, 9}) {
        const auto scattered = random_labels(mesh.num_cells(), parts, 1);
        check_pieces(mesh, scattered, parts, {Contact::point, layers, 0});
        check_pieces(mesh, scattered, parts, {Contact::facet, layers, 0});
        check_pieces(mesh, scattered, parts, {Contact::radius, layers, 1.2});
        PartitionOptions options;
        options.method = "hilbert";
        check_pieces(mesh, partition_labels(mesh, parts, options).parts, parts,
                     {Contact::point, layers, 0});
      }
    }
  }
}

TEST(Pieces, AreTheSameForAnyThreads) {
  const Mesh mesh = box_of_cubes(9, 8, 7);
  const auto labels = random_labels(mesh.num_cells(), 6, 2);
  const auto one = cut_into_pieces(mesh, labels, 6, {Contact::point, 2, 0}, 1);
  const auto many = cut_into_pieces(mesh, labels, 6, {Contact::point, 2, 0}, 4);
  for (size_t part = 0; part < one.size(); ++part) {
    EXPECT_EQ(one[part].cells, many[part].cells);
    EXPECT_EQ(one[part].points, many[part].points);
    EXPECT_EQ(one[part].nodes, many[part].nodes);
  }
}

TEST(Pieces, LooseEmptyAndExampleFromTheHeader) {
  const Mesh line = row_of_lines(3);
  const std::vector<int32_t> labels{0, 0, 1};
  const auto pieces = cut_into_pieces(line, labels, 3, {Contact::point, 1, 0}, 1);
  EXPECT_EQ(pieces[0].cells, (std::vector<int64_t>{0, 1, 2}));
  EXPECT_EQ(pieces[1].cells, (std::vector<int64_t>{2, 1}));
  ASSERT_EQ(pieces[0].cell_exchange.sends.size(), 1U);
  EXPECT_EQ(pieces[0].cell_exchange.sends[0].part, 1);
  EXPECT_EQ(pieces[0].cell_exchange.sends[0].rows, (std::vector<int64_t>{1}));
  EXPECT_TRUE(pieces[2].cells.empty());
  EXPECT_TRUE(pieces[2].points.empty());

  const Mesh loose(Array<double>::owning({0, 1, 2, 3, 4}), 1,
                   {CellBlock::uniform(CellKind::line, Array<int64_t>::owning({0, 1, 1, 2}))});
  const auto two = cut_into_pieces(loose, std::vector<int32_t>{1, 0}, 2, {Contact::point, 0, 0}, 1);
  EXPECT_EQ(two[0].points, (std::vector<int64_t>{1, 2, 3, 4}));
  EXPECT_EQ(two[1].points, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(two[1].point_exchange.num_owned, 1);
}

TEST(Pieces, RefuseLabelsThatAreNoParts) {
  const Mesh line = row_of_lines(3);
  const GhostRule rule{};
  EXPECT_THROW((void)cut_into_pieces(line, std::vector<int32_t>{0, 2, 0}, 2, rule, 1),
               std::invalid_argument);
  EXPECT_THROW((void)cut_into_pieces(line, std::vector<int32_t>{0, 0}, 2, rule, 1),
               std::invalid_argument);
  EXPECT_THROW(
      (void)cut_into_pieces(line, std::vector<int32_t>{0, 1, 0}, 2, {Contact::point, -1, 0}, 1),
      std::invalid_argument);
  EXPECT_THROW(
      (void)cut_into_pieces(line, std::vector<int32_t>{0, 1, 0}, 2, {Contact::radius, 1, 0}, 1),
      std::invalid_argument);
  EXPECT_THROW(
      (void)cut_into_pieces(line, std::vector<int32_t>{0, 1, 0}, 2, {Contact::point, 1, 2}, 1),
      std::invalid_argument);
}

// CASES M1: interior facet terms over a cut need the neighbour's value: 4 cells 0, 1, 4, 9 have the
// sum of squared jumps 35 for any number of parts. Each facet is counted by the lower owner.
TEST(Cases, M1JumpsAcrossPartsAreNotLost) {
  const Mesh line = row_of_lines(4);
  const std::vector<double> field{0, 1, 4, 9};
  for (const int64_t parts : {1, 2, 4}) {
    PartitionOptions options;
    options.method = "hilbert";
    options.ghosts.layers = 1;
    const Partition cut = partition(line, parts, options);
    std::vector<ExchangePlan> plans;
    std::vector<std::vector<double>> values;
    for (const Piece& piece : cut.pieces) {
      plans.push_back(piece.cell_exchange);
      values.emplace_back(piece.cells.size(), 1e9);
      for (int64_t i = 0; i < piece.cell_exchange.num_owned; ++i) {
        values.back()[static_cast<size_t>(i)] =
            field[static_cast<size_t>(piece.cells[static_cast<size_t>(i)])];
      }
    }
    play(plans, values);
    double jumps = 0;
    for (size_t part = 0; part < cut.pieces.size(); ++part) {
      const Piece& piece = cut.pieces[part];
      for (size_t i = 0; i < piece.cells.size(); ++i) {
        for (size_t j = 0; j < piece.cells.size(); ++j) {
          const bool facet = piece.cells[j] == piece.cells[i] + 1;
          const auto counted_by = std::min(piece.cell_owners[i], piece.cell_owners[j]);
          if (!facet || counted_by != piece.part) continue;
          jumps += (values[part][j] - values[part][i]) * (values[part][j] - values[part][i]);
        }
      }
    }
    EXPECT_EQ(jumps, 35);
  }
}

}  // namespace
}  // namespace shardfield::graph
