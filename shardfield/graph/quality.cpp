#include "shardfield/graph/quality.h"

#include <algorithm>
#include <numeric>

namespace shardfield::graph {

namespace {

int64_t sum_of(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

/// Connected components of each part, found by flooding.
std::vector<int64_t> count_fragments(const Lists& across, std::span<const int32_t> labels,
                                     int64_t num_parts) {
  std::vector<int64_t> fragments(static_cast<size_t>(num_parts));
  std::vector<uint8_t> seen(labels.size());
  std::vector<int64_t> stack;
  for (size_t start = 0; start < labels.size(); ++start) {
    if (seen[start] != 0) continue;
    seen[start] = 1;
    ++fragments[static_cast<size_t>(labels[start])];
    stack.push_back(static_cast<int64_t>(start));
    while (!stack.empty()) {
      const int64_t cell = stack.back();
      stack.pop_back();
      for (const int64_t other : across[cell]) {
        const auto at = static_cast<size_t>(other);
        if (seen[at] != 0 || labels[at] != labels[start]) continue;
        seen[at] = 1;
        stack.push_back(other);
      }
    }
  }
  return fragments;
}

}  // namespace

int64_t Quality::largest_halo() const {
  return halos.empty() ? 0 : *std::max_element(halos.begin(), halos.end());
}

int64_t Quality::total_halo() const {
  return sum_of(halos);
}

int64_t Quality::total_facet_halo() const {
  return sum_of(facet_halos);
}

double Quality::imbalance() const {
  const double total = std::accumulate(loads.begin(), loads.end(), 0.0);
  if (!(total > 0)) return 1;
  return *std::max_element(loads.begin(), loads.end()) * static_cast<double>(loads.size()) / total;
}

Quality measure(const Lists& across, std::vector<int64_t> halos, std::span<const int32_t> labels,
                int64_t num_parts, std::span<const double> weights) {
  Quality quality;
  quality.halos = std::move(halos);
  quality.cells.resize(static_cast<size_t>(num_parts));
  quality.loads.resize(static_cast<size_t>(num_parts));
  quality.facet_halos.resize(static_cast<size_t>(num_parts));
  std::vector<int32_t> touched;
  for (size_t cell = 0; cell < labels.size(); ++cell) {
    const auto own = static_cast<size_t>(labels[cell]);
    ++quality.cells[own];
    quality.loads[own] += weights.empty() ? 1 : weights[cell];
    touched.clear();
    for (const int64_t other : across[static_cast<int64_t>(cell)]) {
      const int32_t part = labels[static_cast<size_t>(other)];
      if (part == labels[cell]) continue;
      ++quality.cut;
      if (std::find(touched.begin(), touched.end(), part) != touched.end()) continue;
      touched.push_back(part);
      ++quality.facet_halos[static_cast<size_t>(part)];
    }
  }
  quality.cut /= 2;
  quality.fragments = count_fragments(across, labels, num_parts);
  return quality;
}

}  // namespace shardfield::graph
