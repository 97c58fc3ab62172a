#include "shardfield/graph/bistride.h"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace shardfield::graph {

namespace {

constexpr int8_t kUnseen = -1;

/// Whether each node's layer is even (0) or odd (1) in a search from `start`; returns its
/// component.
std::vector<int64_t> search(const Lists& graph, int64_t start, std::vector<int8_t>& parities) {
  std::vector<int64_t> component{start};
  parities[static_cast<size_t>(start)] = 0;
  for (size_t done = 0; done < component.size(); ++done) {
    const int64_t node = component[done];
    for (const int64_t other : graph[node]) {
      int8_t& parity = parities[static_cast<size_t>(other)];
      if (parity != kUnseen) continue;
      parity = static_cast<int8_t>(1 - parities[static_cast<size_t>(node)]);
      component.push_back(other);
    }
  }
  return component;
}

/// Nodes of every other layer of each component, ascending.
std::vector<int64_t> kept_nodes(const Lists& graph) {
  std::vector<int8_t> parities(static_cast<size_t>(graph.num_rows()), kUnseen);
  std::vector<int64_t> kept;
  for (int64_t start = 0; start < graph.num_rows(); ++start) {
    if (parities[static_cast<size_t>(start)] != kUnseen) continue;
    const std::vector<int64_t> component = search(graph, start, parities);
    const auto is_odd = [&](int64_t node) { return parities[static_cast<size_t>(node)] == 1; };
    const auto odd = std::count_if(component.begin(), component.end(), is_odd);
    const bool keep_odd = odd > 0 && 2 * odd < static_cast<int64_t>(component.size());
    std::copy_if(component.begin(), component.end(), std::back_inserter(kept),
                 [&](int64_t node) { return is_odd(node) == keep_odd; });
  }
  std::sort(kept.begin(), kept.end());
  return kept;
}

/// Links between kept nodes that one or two links of the graph join.
Lists links_of_kept(const Lists& graph, const std::vector<int64_t>& kept) {
  std::vector<int64_t> place(static_cast<size_t>(graph.num_rows()), -1);
  for (size_t i = 0; i < kept.size(); ++i) {
    place[static_cast<size_t>(kept[i])] = static_cast<int64_t>(i);
  }
  std::vector<int64_t> found_by(kept.size(), -1);  // the last row that holds each kept node
  Lists links;
  links.offsets.reserve(kept.size() + 1);
  for (size_t row = 0; row < kept.size(); ++row) {
    const auto mark = static_cast<int64_t>(row);
    found_by[row] = mark;
    const auto add = [&](int64_t node) {
      const int64_t number = place[static_cast<size_t>(node)];
      if (number < 0 || found_by[static_cast<size_t>(number)] == mark) return;
      found_by[static_cast<size_t>(number)] = mark;
      links.targets.push_back(number);
    };
    for (const int64_t near : graph[kept[row]]) {
      add(near);
      for (const int64_t far : graph[near]) add(far);
    }
    std::sort(links.targets.begin() + links.offsets.back(), links.targets.end());
    links.offsets.push_back(static_cast<int64_t>(links.targets.size()));
  }
  return links;
}

}  // namespace

std::vector<CoarseLevel> bistride_levels(const Lists& graph, int64_t num_levels) {
  if (num_levels < 0) {
    throw std::invalid_argument("bistride: expected 0 or more levels, got " +
                                std::to_string(num_levels));
  }
  std::vector<CoarseLevel> levels;
  levels.reserve(static_cast<size_t>(num_levels));
  for (int64_t i = 0; i < num_levels; ++i) {
    const Lists& finer = levels.empty() ? graph : levels.back().links;
    std::vector<int64_t> kept = kept_nodes(finer);
    Lists links = links_of_kept(finer, kept);
    levels.push_back({std::move(kept), std::move(links)});
  }
  return levels;
}

}  // namespace shardfield::graph
