#include "shardfield/graph/fields.h"

#include <stdexcept>

#include "graph/mesh_files.h"

namespace shardfield::graph {
namespace {

/// Lines 0-1, 1-2, 2-3; the last is part 1's; one ghost layer.
std::vector<Piece> two_parts(const Mesh& lines) {
  return cut_into_pieces(lines, std::vector<int32_t>{0, 0, 1}, 2, {Contact::point, 1, 0}, 1);
}

TEST(Fields, PiecesTakeTheirRowsWithOwnersNumbersAndGhosts) {
  const Mesh lines = row_of_lines(3);
  const at::Tensor heat = at::tensor({0.5, 1.5, 2.5}, at::kDouble).requires_grad_();
  const auto pieces = two_parts(lines);

  const Fields cells = cell_fields_of(pieces[1], {{"heat", heat}, {"owner", heat}});

  expect_same(cells, {{"heat", at::tensor({2.5, 1.5}, at::kDouble)},
                      {"owner", at::tensor({1, 0}, at::kInt)},
                      {"global_id", at::tensor({2, 1}, at::kLong)},
                      {"ghost_layer", at::tensor({0, 1}, at::kInt)},
                      {"vtkGhostType", at::tensor({0, 1}, at::kByte)}});
}

TEST(Fields, PointsOfOtherPartsAreGhosts) {
  const Mesh lines = row_of_lines(3);
  const at::Tensor place = at::arange(8, at::kFloat).reshape({4, 2});

  const Fields points = point_fields_of(two_parts(lines)[1], {{"place", place}});

  // Point 2 belongs to part 0, the lowest that has a cell at it, as point 1 does.
  expect_same(points, {{"place", place.index_select(0, at::tensor({3, 1, 2}, at::kLong))},
                       {"owner", at::tensor({1, 0, 0}, at::kInt)},
                       {"global_id", at::tensor({3, 1, 2}, at::kLong)},
                       {"vtkGhostType", at::tensor({0, 1, 1}, at::kByte)}});
}

TEST(Fields, WhatFitsNoFileIsRefusedByName) {
  const Mesh lines = row_of_lines(3);
  const auto check = [&](const Fields& points, const Fields& cells) {
    return [&lines, points, cells] { check_fields("write", lines, points, cells); };
  };
  check(fields_of_rows(4), fields_of_rows(3))();  // all that fits passes
  using Wrong = std::invalid_argument;
  expect_words<Wrong>(check({{"heat", at::zeros({3})}}, {}),
                      {"write: point field \"heat\": expected 4 rows, got 3"});
  expect_words<Wrong>(check({}, {{"heat", at::zeros({})}}),
                      {"write: cell field \"heat\": expected 3 rows, got a number"});
  expect_words<Wrong>(check({}, {{"stress", at::zeros({3, 3, 3})}}),
                      {"cell field \"stress\": expected one or two dims, got 3"});
  expect_words<Wrong>(check({{"wave", at::zeros({4}, at::kComplexFloat)}}, {}),
                      {"point field \"wave\": mesh files lack the type ComplexFloat"});
}

}  // namespace
}  // namespace shardfield::graph
