#include "shardfield/spec/rank_groups.h"

#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace shardfield::spec {
namespace {

TEST(RankGroups, BlocksAndTheGroupsAcrossThem) {
  const Partition world = {{0, 1, 2, 3, 4, 5}};
  const Partition pairs = consecutive_groups(world, 2, "pair");
  EXPECT_EQ(pairs, (Partition{{0, 1}, {2, 3}, {4, 5}}));
  EXPECT_EQ(orthogonal_groups(world, pairs), (Partition{{0, 2, 4}, {1, 3, 5}}));
  EXPECT_THROW(consecutive_groups(world, 4, "four"), c10::Error);
}

TEST(RankGroups, InfersWhatFollows) {
  const auto sizes =
      infer_sizes({{"world"}, {"data", 0, 0}, {"domain", 4, 0}, {"h", 2, 2}, {"w", 0, 2}}, 8);
  EXPECT_EQ(sizes[0].size, 8);
  EXPECT_EQ(sizes[1].size, 2);
  EXPECT_EQ(sizes[4].size, 2);
  EXPECT_EQ(infer_sizes({{"world"}, {"a", 3, 0}, {"b", 2, 0}}, 0)[0].size, 6);
}

TEST(RankGroups, SizesThatDoNotMultiplyOutAreNamed) {
  try {
    infer_sizes({{"world"}, {"data", 2, 0}, {"domain", 3, 0}}, 8);
    FAIL() << "no error";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("data=2, domain=3 = 6"), std::string::npos);
  }
  EXPECT_THROW(infer_sizes({{"world"}, {"a", 3, 0}, {"b", 0, 0}}, 8), c10::Error);
  EXPECT_THROW(infer_sizes({{"world"}, {"a", 0, 0}, {"b", 0, 0}}, 8), c10::Error);
  EXPECT_THROW(infer_sizes({{"world", 4}}, 8), c10::Error);
}

TEST(RankGroups, PlanOfANestedTree) {  // case K5
  const std::vector<GroupNode> tree = {
      {"world"}, {"data", 2, 0}, {"domain", 0, 0}, {"h", 2, 2}, {"w", 2, 2}};
  const auto first = plan_groups(tree, 8);
  EXPECT_EQ(first[0].name, "data");
  EXPECT_EQ(first[0].groups, (Partition{{0, 1}, {2, 3}, {4, 5}, {6, 7}}));
  EXPECT_EQ(first[1].groups, (Partition{{0, 2, 4, 6}, {1, 3, 5, 7}}));
  EXPECT_EQ(first[2].groups, (Partition{{0, 2}, {4, 6}, {1, 3}, {5, 7}}));
  EXPECT_EQ(first[3].groups, (Partition{{0, 4}, {2, 6}, {1, 5}, {3, 7}}));
  // The last sibling innermost: as in a row-major mesh.
  const auto last = plan_groups({{"world"}, {"data", 2, 0}, {"domain", 2, 0}}, 4, false);
  EXPECT_EQ(last[0].name, "domain");
  EXPECT_EQ(last[0].groups, (Partition{{0, 1}, {2, 3}}));
  EXPECT_EQ(last[1].groups, (Partition{{0, 2}, {1, 3}}));
}

}  // namespace
}  // namespace shardfield::spec
