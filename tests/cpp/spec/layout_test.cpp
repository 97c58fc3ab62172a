#include "shardfield/spec/layout.h"

#include <array>
#include <random>

#include <gtest/gtest.h>

#include "shardfield/spec/reshape_layout.h"

namespace shardfield::spec {
namespace {

using Sizes = std::vector<int64_t>;

Mesh mesh_at(Sizes shape, int rank) {
  Mesh mesh;
  mesh.shape = std::move(shape);
  mesh.rank = rank;
  mesh.coord = mesh.coord_of(rank);
  return mesh;
}

TEST(Mesh, RanksAreRowMajor) {
  const Mesh mesh = mesh_at({2, 3}, 4);
  EXPECT_EQ(mesh.coord, (Sizes{1, 1}));
  EXPECT_EQ(mesh.rank_at({1, 2}), 5);
  EXPECT_EQ(mesh.size(), 6);
}

TEST(Layout, EqualCutsAreOneObject) {
  static const Mesh mesh = mesh_at({2}, 1);
  const Layout* a = intern_layout(mesh, {{1, {0}, {3, 2}}});
  EXPECT_EQ(a, intern_layout(mesh, {{1, {0}, {3, 2}}}));
  EXPECT_NE(a, intern_layout(mesh, {{1, {0}, {2, 3}}}));
  EXPECT_EQ(a->local_size(0), 2);
  EXPECT_EQ(a->local_offset(0), 3);
  EXPECT_EQ(intern_layout(mesh, {}), nullptr);
}

TEST(Layout, TwoAxesOnOneDimOfLengthFive) {
  const Sizes expected_offsets{0, 2, 3, 4};
  for (int rank = 0; rank < 4; ++rank) {
    static std::array<Mesh, 4> meshes;
    meshes[rank] = mesh_at({2, 2}, rank);
    const Layout* layout = intern_layout(meshes[rank], {{0, {0, 1}, {2, 1, 1, 1}}});
    EXPECT_EQ(layout->local_offset(0), expected_offsets[rank]);
  }
}

TEST(ReshapeLayout, WorkedExamples) {
  static const Mesh mesh = mesh_at({2}, 0);
  const Layout* layout = intern_layout(mesh, {{1, {0}, {3, 2}}});
  const Sizes sizes{2, 5, 3};
  EXPECT_EQ(*reshape_layout(*layout, sizes, Sizes{2, 15}), intern_layout(mesh, {{1, {0}, {9, 6}}}));
  const Layout* merged = *reshape_layout(*layout, sizes, Sizes{10, 3});
  EXPECT_EQ(merged, intern_layout(mesh, {{0, {0}, {3, 2}}}));
  EXPECT_FALSE(merged->is_simple(Sizes{10, 3}.data()));
  EXPECT_EQ(merged->local_sizes(Sizes{10, 3}.data(), 2), (Sizes{6, 3}));
  const Layout* rows = intern_layout(mesh, {{0, {0}, {3, 1}}});
  EXPECT_FALSE(reshape_layout(*rows, Sizes{4, 6}, Sizes{2, 12}).has_value());
}

/// Elements of a tensor of these sizes that a layout gives its rank, as flat indices in order.
Sizes owned(const Layout& layout, const Sizes& sizes) {
  int64_t total = 1;
  for (int64_t s : sizes) total *= s;
  Sizes mine;
  for (int64_t flat = 0; flat < total; ++flat) {
    Sizes at(sizes.size());
    int64_t rest = flat;
    for (size_t d = sizes.size(); d-- > 0; rest /= sizes[d]) at[d] = rest % sizes[d];
    bool own = true;
    for (size_t c = layout.cuts().size(); c-- > 0;) {
      const Cut& cut = layout.cuts()[c];
      const int64_t digit = at[cut.dim] % cut.total();
      at[cut.dim] /= cut.total();
      own &=
          digit >= layout.local_offset(c) && digit < layout.local_offset(c) + layout.local_size(c);
    }
    if (own) mine.push_back(flat);
  }
  return mine;
}

TEST(ReshapeLayout, EveryRankKeepsItsElementsInOrder) {
  const auto seed = std::random_device{}();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937 draw(seed);
  const auto pick = [&](int64_t n) { return static_cast<int64_t>(draw() % n); };
  int mapped = 0;
  for (int trial = 0; trial < 400; ++trial) {
    const Sizes sizes{1 + pick(4), 1 + pick(4), 1 + pick(4)};
    static std::vector<std::unique_ptr<Mesh>> meshes;
    meshes.push_back(std::make_unique<Mesh>(mesh_at({2, 2}, static_cast<int>(pick(4)))));
    std::vector<Cut> cuts;
    for (int axis = 0; axis < 2; ++axis) {
      const int dim = axis == 0 ? static_cast<int>(pick(2)) : 2;
      const int64_t first = pick(sizes[dim] + 1);
      cuts.push_back({dim, {axis}, {first, sizes[dim] - first}});
    }
    const Layout* layout = intern_layout(*meshes.back(), cuts);
    for (const Sizes& to :
         {Sizes{sizes[0] * sizes[1], sizes[2]}, Sizes{sizes[0], sizes[1] * sizes[2]},
          Sizes{sizes[0] * sizes[1] * sizes[2]}, Sizes{sizes[0], 1, sizes[1], sizes[2]}}) {
      const auto moved = reshape_layout(*layout, sizes, to);
      if (!moved) continue;
      ++mapped;
      EXPECT_EQ(owned(*layout, sizes), owned(**moved, to)) << layout->to_string();
      const auto back = reshape_layout(**moved, to, sizes);
      ASSERT_TRUE(back.has_value());
      EXPECT_EQ(owned(**back, sizes), owned(*layout, sizes));
    }
  }
  EXPECT_GT(mapped, 1000);
}

}  // namespace
}  // namespace shardfield::spec
