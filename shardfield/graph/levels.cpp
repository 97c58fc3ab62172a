#include "shardfield/graph/levels.h"

#include <algorithm>
#include <numeric>

#include "shardfield/graph/balance.h"
#include "shardfield/graph/curve.h"

namespace shardfield::graph {

namespace {

/// Nodes of `members` (marked with `mark`) in breadth-first order from `start`, then from the
/// first node not yet reached, until all are.
std::vector<int64_t> level_order(const Lists& graph, const std::vector<int64_t>& members,
                                 std::vector<int64_t>& marks, int64_t mark, int64_t start) {
  std::vector<int64_t> order;
  order.reserve(members.size());
  const auto visit = [&](int64_t node) {
    if (marks[static_cast<size_t>(node)] != mark) return;
    marks[static_cast<size_t>(node)] = mark + 1;
    order.push_back(node);
  };
  size_t done = 0;
  visit(start);
  for (size_t i = 0; order.size() < members.size() || done < order.size();) {
    while (done < order.size()) {
      for (const int64_t other : graph[order[done]]) visit(other);
      ++done;
    }
    if (order.size() < members.size()) visit(members[i++]);
  }
  return order;
}

/// How many nodes of `order` make `share` of its weight.
int64_t place_of_share(const std::vector<int64_t>& order, std::span<const double> weights,
                       double share) {
  double total = 0;
  for (const int64_t node : order) total += weight_of(weights, node);
  double sum = 0;
  int64_t at = 0;
  for (const int64_t node : order) {
    const double w = weight_of(weights, node);
    if (sum + w / 2 >= total * share) break;
    sum += w;
    ++at;
  }
  return at;
}

/// Nodes that are to become the parts first_part .. first_part + num_parts - 1, ascending.
struct Task {
  std::vector<int64_t> nodes;
  int64_t first_part, num_parts;
};

std::vector<int64_t> sorted(std::vector<int64_t> nodes) {
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

}  // namespace

std::vector<int32_t> halve_by_levels(const Lists& graph, std::span<const double> weights,
                                     int64_t num_parts) {
  const int64_t count = graph.num_rows();
  std::vector<int32_t> labels(static_cast<size_t>(count));
  std::vector<int64_t> marks(static_cast<size_t>(count));
  std::vector<int64_t> all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), int64_t{0});
  std::vector<Task> tasks;
  tasks.push_back({std::move(all), 0, num_parts});
  int64_t mark = 1;
  while (!tasks.empty()) {
    const Task task = std::move(tasks.back());
    tasks.pop_back();
    if (task.num_parts == 1 || task.nodes.empty()) {
      for (const int64_t node : task.nodes) {
        labels[static_cast<size_t>(node)] = static_cast<int32_t>(task.first_part);
      }
      continue;
    }
    std::vector<int64_t> order = task.nodes;
    for (int sweep = 0; sweep < 3; ++sweep, mark += 2) {  // the last node of a sweep lies far out
      for (const int64_t node : task.nodes) marks[static_cast<size_t>(node)] = mark;
      order =
          level_order(graph, task.nodes, marks, mark, sweep == 0 ? order.front() : order.back());
    }
    const int64_t left = task.num_parts / 2;
    const int64_t at =
        weights.empty()
            ? even_border(task.first_part + left, count, num_parts) -
                  even_border(task.first_part, count, num_parts)
            : place_of_share(order, weights,
                             static_cast<double>(left) / static_cast<double>(task.num_parts));
    tasks.push_back({sorted({order.begin(), order.begin() + at}), task.first_part, left});
    tasks.push_back(
        {sorted({order.begin() + at, order.end()}), task.first_part + left, task.num_parts - left});
  }
  return labels;
}

}  // namespace shardfield::graph
