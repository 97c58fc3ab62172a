#include "shardfield/spec/rank_groups.h"

#include <algorithm>
#include <numeric>

#include "shardfield/base/error.h"

namespace shardfield::spec {

namespace {

constexpr const char* kOp = "process groups";

std::vector<int> children_of(const std::vector<GroupNode>& nodes, int node) {
  std::vector<int> children;
  for (size_t i = 0; i < nodes.size(); ++i)
    if (nodes[i].parent == node) children.push_back(static_cast<int>(i));
  return children;
}

std::string listed(const std::vector<GroupNode>& nodes, const std::vector<int>& which) {
  std::string text;
  for (const int i : which)
    text += (text.empty() ? "" : ", ") + nodes[i].name + "=" +
            (nodes[i].size ? std::to_string(nodes[i].size) : "?");
  return text;
}

/// Fills what the children, or the parent and all children but one, determine. True on a change.
bool infer_at(std::vector<GroupNode>& nodes, int node) {
  const std::vector<int> children = children_of(nodes, node);
  if (children.empty()) return false;
  int64_t known = 1;
  std::vector<int> unknown;
  for (const int c : children) {
    if (nodes[c].size) known *= nodes[c].size;
    if (!nodes[c].size) unknown.push_back(c);
  }
  if (unknown.empty() && !nodes[node].size) {
    nodes[node].size = known;
    return true;
  }
  if (unknown.size() != 1 || !nodes[node].size) return false;
  SHARDFIELD_CHECK(nodes[node].size % known == 0, kOp, "'", nodes[node].name, "' has ",
                   nodes[node].size, " ranks, which its children (", listed(nodes, children),
                   ") do not divide");
  nodes[unknown[0]].size = nodes[node].size / known;
  return true;
}

void check_products(const std::vector<GroupNode>& nodes) {
  for (size_t i = 0; i < nodes.size(); ++i) {
    const std::vector<int> children = children_of(nodes, static_cast<int>(i));
    if (children.empty()) continue;
    int64_t product = 1;
    for (const int c : children) product *= nodes[c].size;
    SHARDFIELD_CHECK(product == nodes[i].size, kOp, "expected the sizes of the children of '",
                     nodes[i].name, "' to multiply out to its ", nodes[i].size, " ranks, got ",
                     listed(nodes, children), " = ", product,
                     "; correct a size or leave one out to have it inferred");
  }
}

}  // namespace

Partition consecutive_groups(const Partition& within, int64_t size, const std::string& name) {
  Partition blocks;
  for (const auto& group : within) {
    const auto n = static_cast<int64_t>(group.size());
    SHARDFIELD_CHECK(size > 0 && n % size == 0, kOp, "expected a size that divides the ", n,
                     " ranks of the enclosing group, got ", size, " for '", name, "'");
    for (auto first = group.begin(); first != group.end(); first += size)
      blocks.emplace_back(first, first + size);
  }
  return blocks;
}

Partition orthogonal_groups(const Partition& within, const Partition& blocks) {
  Partition crossing;
  for (const auto& group : within) {
    std::vector<const std::vector<int>*> mine;
    for (const auto& block : blocks)
      if (std::find(group.begin(), group.end(), block.front()) != group.end())
        mine.push_back(&block);
    for (size_t i = 0; !mine.empty() && i < mine.front()->size(); ++i) {
      crossing.emplace_back();
      for (const auto* block : mine) crossing.back().push_back(block->at(i));
    }
  }
  return crossing;
}

std::vector<GroupNode> infer_sizes(std::vector<GroupNode> nodes, int64_t world_size) {
  SHARDFIELD_CHECK(!nodes.empty() && nodes[0].parent == -1, kOp, "expected a root node");
  SHARDFIELD_CHECK(!world_size || !nodes[0].size || nodes[0].size == world_size, kOp, "the root '",
                   nodes[0].name, "' has size ", nodes[0].size, ", the job has ", world_size,
                   " ranks");
  if (world_size) nodes[0].size = world_size;
  for (bool changed = true; changed;) {
    changed = false;
    for (size_t i = 0; i < nodes.size(); ++i) changed |= infer_at(nodes, static_cast<int>(i));
  }
  std::vector<int> unknown;
  for (size_t i = 0; i < nodes.size(); ++i)
    if (!nodes[i].size) unknown.push_back(static_cast<int>(i));
  SHARDFIELD_CHECK(unknown.empty(), kOp, "cannot infer the sizes of ", listed(nodes, unknown),
                   "; give all but one child of each parent");
  check_products(nodes);
  return nodes;
}

std::vector<NamedPartition> plan_groups(std::vector<GroupNode> nodes, int64_t world_size,
                                        bool first_is_innermost) {
  nodes = infer_sizes(std::move(nodes), world_size);
  std::vector<Partition> groups(nodes.size());
  std::vector<int> world(static_cast<size_t>(world_size));
  std::iota(world.begin(), world.end(), 0);
  groups[0] = {world};
  std::vector<NamedPartition> plan;
  for (size_t i = 0; i < nodes.size(); ++i) {
    std::vector<int> children = children_of(nodes, static_cast<int>(i));
    if (!first_is_innermost) std::reverse(children.begin(), children.end());
    Partition rest = groups[i];
    for (const int c : children) {
      groups[c] = consecutive_groups(rest, nodes[c].size, nodes[c].name);
      plan.push_back({nodes[c].name, groups[c], rest});
      rest = orthogonal_groups(rest, groups[c]);
    }
  }
  return plan;
}

}  // namespace shardfield::spec
