#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardfield::spec {

/// Disjoint groups of ranks, each in group order.
using Partition = std::vector<std::vector<int>>;

/// Every group of `within` cut into blocks of `size` consecutive members. {0..3}, 2 gives {0,1},
/// {2,3}. Pure. @throws c10::Error when size does not divide a group.
Partition consecutive_groups(const Partition& within, int64_t size, const std::string& name);

/// The i-th members of the blocks that share a group of `within`: {0..3} with blocks {0,1}, {2,3}
/// gives {0,2}, {1,3}. Pure.
Partition orthogonal_groups(const Partition& within, const Partition& blocks);

/// One node of a tree of named groups. Nodes are listed parents first; the root has parent -1.
struct GroupNode {
  std::string name;
  int64_t size = 0;  ///< ranks per group; 0: to be inferred
  int parent = -1;
};

/// Sizes filled in and checked: a node with children is their product, one unknown child is what
/// the others leave of the parent, the root is `world_size`. Pure.
/// @param world_size  0 when not known: nothing is then required of the root
/// @throws c10::Error when sizes do not multiply out or one cannot be inferred, naming the nodes.
std::vector<GroupNode> infer_sizes(std::vector<GroupNode> nodes, int64_t world_size);

struct NamedPartition {
  std::string name;
  Partition groups;
  Partition within;  ///< the groups that these cut into blocks
};

/// The groups of every node but the root, parents first. Siblings are orthogonal to each other:
/// of world > (a, b) with sizes 2 and 2, a is {0,1}, {2,3} and b is {0,2}, {1,3}. Pure.
/// @param first_is_innermost  the first sibling gets consecutive ranks; else the last one does
std::vector<NamedPartition> plan_groups(std::vector<GroupNode> nodes, int64_t world_size,
                                        bool first_is_innermost = true);

}  // namespace shardfield::spec
