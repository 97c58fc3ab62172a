#include "shardfield/graph/swaps.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <numeric>
#include <queue>
#include <utility>

namespace shardfield::graph {

namespace {

std::vector<double> loads_of(std::span<const double> weights, const std::vector<int32_t>& labels,
                             int64_t num_parts) {
  std::vector<double> loads(static_cast<size_t>(num_parts));
  for (size_t cell = 0; cell < labels.size(); ++cell) {
    loads[static_cast<size_t>(labels[cell])] += weight_of(weights, static_cast<int64_t>(cell));
  }
  return loads;
}

/// The state of one improvement run over pairs of parts.
class HaloSwaps {
 public:
  HaloSwaps(const Lists& graph, std::span<const double> weights, const Balance& balance,
            int64_t num_parts, std::vector<int32_t>& labels)
      : graph_(graph),
        weights_(weights),
        balance_(balance),
        labels_(labels),
        loads_(loads_of(weights, labels, num_parts)),
        halos_(static_cast<size_t>(num_parts)),
        locked_(labels.size()),
        near_(labels.size()),
        counted_(labels.size()) {
    std::vector<int32_t> touched;
    for (int64_t cell = 0; cell < graph.num_rows(); ++cell) {
      touched.clear();
      for (const int64_t other : graph[cell]) {
        const int32_t part = label(other);
        if (part == label(cell) ||
            std::find(touched.begin(), touched.end(), part) != touched.end()) {
          continue;
        }
        touched.push_back(part);
        ++halos_[static_cast<size_t>(part)];
      }
    }
    const double sum = std::accumulate(halos_.begin(), halos_.end(), 0.0);
    mean_halo_ = std::max(1.0, sum / static_cast<double>(num_parts));
  }

  /// One pass over all pairs of touching parts, those with large halos first. True if one improved.
  bool pass() {
    std::map<std::pair<int32_t, int32_t>, std::vector<int64_t>> borders;
    std::vector<int32_t> seen;
    for (int64_t cell = 0; cell < graph_.num_rows(); ++cell) {
      seen.clear();
      for (const int64_t other : graph_[cell]) {
        const int32_t part = label(other);
        if (part == label(cell) || std::find(seen.begin(), seen.end(), part) != seen.end()) {
          continue;
        }
        seen.push_back(part);
        borders[std::minmax(label(cell), part)].push_back(cell);
      }
    }
    std::vector<std::pair<int64_t, std::pair<int32_t, int32_t>>> order;
    const int64_t largest = *std::max_element(halos_.begin(), halos_.end());
    for (const auto& [pair, cells] : borders) {
      const int64_t larger = std::max(halo(pair.first), halo(pair.second));
      if (10 * larger >= 9 * largest) order.emplace_back(-larger, pair);
    }
    std::sort(order.begin(), order.end());
    bool improved = false;
    for (const auto& [key, pair] : order) improved |= improve(pair, borders[pair]);
    return improved;
  }

 private:
  struct Move {
    double gain;
    int64_t cell;
    friend bool operator<(const Move& a, const Move& b) {
      return a.gain != b.gain ? a.gain < b.gain : a.cell > b.cell;
    }
  };
  struct Change {
    int64_t from = 0;
    int64_t to = 0;
  };

  [[nodiscard]] int32_t label(int64_t cell) const { return labels_[static_cast<size_t>(cell)]; }
  [[nodiscard]] int64_t halo(int32_t part) const { return halos_[static_cast<size_t>(part)]; }
  double& load(int32_t part) { return loads_[static_cast<size_t>(part)]; }

  /// How many neighbours `cell` has in either part of the pair at hand, counted at first use and
  /// kept up to date by move().
  const std::array<int32_t, 2>& near(int64_t cell) {
    auto& counts = near_[static_cast<size_t>(cell)];
    if (counted_[static_cast<size_t>(cell)] == visit_) return counts;
    counted_[static_cast<size_t>(cell)] = visit_;
    counts = {};
    for (const int64_t other : graph_[cell]) {
      counts[0] += static_cast<int32_t>(label(other) == pair_[0]);
      counts[1] += static_cast<int32_t>(label(other) == pair_[1]);
    }
    return counts;
  }

  /// What moving `cell` from side `from` of the pair to the other does to their halos; no other
  /// halo changes.
  [[nodiscard]] Change change_of(int64_t cell, size_t from) {
    const size_t to = 1 - from;
    Change change;
    for (const int64_t other : graph_[cell]) {
      const int32_t part = label(other);
      const auto& counts = near(other);
      if (part != pair_[from] && counts[from] == 1) --change.from;
      if (part != pair_[to] && counts[to] == 0) ++change.to;
    }
    const auto& own = near(cell);
    change.from += static_cast<int64_t>(own[from] > 0);
    change.to -= static_cast<int64_t>(own[to] > 0);
    return change;
  }

  [[nodiscard]] double cost(int64_t halo_a, int64_t halo_b) const {
    const double a = static_cast<double>(halo_a) / mean_halo_;
    const double b = static_cast<double>(halo_b) / mean_halo_;
    const double a4 = a * a * a * a;
    const double b4 = b * b * b * b;
    return a4 * a4 + b4 * b4;
  }

  [[nodiscard]] double gain_of(int64_t cell, size_t from) {
    const Change change = change_of(cell, from);
    const int64_t halo_from = halo(pair_[from]);
    const int64_t halo_to = halo(pair_[1 - from]);
    return cost(halo_from, halo_to) - cost(halo_from + change.from, halo_to + change.to);
  }

  void move(int64_t cell, size_t from) {
    const size_t to = 1 - from;
    const Change change = change_of(cell, from);
    halos_[static_cast<size_t>(pair_[from])] += change.from;
    halos_[static_cast<size_t>(pair_[to])] += change.to;
    const double w = weight_of(weights_, cell);
    load(pair_[from]) -= w;
    load(pair_[to]) += w;
    labels_[static_cast<size_t>(cell)] = pair_[to];
    for (const int64_t other : graph_[cell]) {
      if (counted_[static_cast<size_t>(other)] != visit_) continue;
      --near_[static_cast<size_t>(other)][from];
      ++near_[static_cast<size_t>(other)][to];
    }
  }

  [[nodiscard]] bool balanced(int32_t part) const {
    const double w = loads_[static_cast<size_t>(part)];
    return w <= balance_.most + 1e-9 && w >= balance_.least - 1e-9;
  }

  using Heap = std::priority_queue<Move>;

  /// The best move out of a side, its gain brought up to date; false when none is left.
  bool top_of(Heap& heap, size_t from, Move& best) {
    while (!heap.empty()) {
      best = heap.top();
      if (locked_[static_cast<size_t>(best.cell)] != 0 || label(best.cell) != pair_[from]) {
        heap.pop();
        continue;
      }
      const double now = gain_of(best.cell, from);
      if (now == best.gain) return true;
      heap.pop();
      heap.push({now, best.cell});
    }
    return false;
  }

  /// Which side moves next: the overweight one, else the one with the better move.
  static int side_of(const std::array<bool, 2>& any, const std::array<Move, 2>& best,
                     double heavier_first) {
    if (heavier_first > 0) return any[0] ? 0 : -1;
    if (heavier_first < 0) return any[1] ? 1 : -1;
    if (any[0] && any[1]) return best[0] < best[1] ? 1 : 0;
    return any[0] ? 0 : any[1] ? 1 : -1;
  }

  /// Offers a border cell of the pair to the heap of its side.
  void offer(int64_t cell, std::array<Heap, 2>& heaps) {
    for (size_t side = 0; side < 2; ++side) {
      if (label(cell) != pair_[side] || locked_[static_cast<size_t>(cell)] != 0) continue;
      if (near(cell)[1 - side] == 0) continue;
      heaps[side].push({gain_of(cell, side), cell});
    }
  }

  [[nodiscard]] double gap() const {
    return loads_[static_cast<size_t>(pair_[0])] - loads_[static_cast<size_t>(pair_[1])];
  }

  /// Moves cells between the two parts of `pair`, and takes back those after the best state.
  bool improve(std::pair<int32_t, int32_t> pair, const std::vector<int64_t>& border) {
    constexpr size_t kPatience = 40;  // moves without a better state before giving up
    pair_ = {pair.first, pair.second};
    ++visit_;
    std::array<Heap, 2> heaps;
    for (const int64_t cell : border) offer(cell, heaps);
    const bool was_balanced = balanced(pair_[0]) && balanced(pair_[1]);
    const double start_cost = cost(halo(pair_[0]), halo(pair_[1]));
    const double start_gap = gap();
    double best_cost = start_cost;
    std::vector<int64_t> moved;
    size_t kept = 0;
    while (moved.size() < kept + kPatience) {
      std::array<Move, 2> best{};
      const std::array<bool, 2> any{top_of(heaps[0], 0, best[0]), top_of(heaps[1], 1, best[1])};
      const bool fine = was_balanced && balanced(pair_[0]) && balanced(pair_[1]);
      const int chosen = side_of(any, best, fine ? 0 : gap() - start_gap);
      if (chosen < 0) break;
      const auto side = static_cast<size_t>(chosen);
      const int64_t cell = best[side].cell;
      heaps[side].pop();
      move(cell, side);
      locked_[static_cast<size_t>(cell)] = 1;
      moved.push_back(cell);
      for (const int64_t other : graph_[cell]) offer(other, heaps);
      const bool allowed =
          was_balanced ? balanced(pair_[0]) && balanced(pair_[1]) : gap() == start_gap;
      const double now = cost(halo(pair_[0]), halo(pair_[1]));
      if (allowed && now < best_cost - 1e-12) {
        best_cost = now;
        kept = moved.size();
      }
    }
    for (const int64_t cell : moved) locked_[static_cast<size_t>(cell)] = 0;
    for (; moved.size() > kept; moved.pop_back()) {
      move(moved.back(), label(moved.back()) == pair_[0] ? 0 : 1);
    }
    return best_cost < start_cost - 1e-12;
  }

  const Lists& graph_;
  std::span<const double> weights_;
  Balance balance_;
  std::vector<int32_t>& labels_;
  std::vector<double> loads_;
  std::vector<int64_t> halos_;
  std::vector<uint8_t> locked_;
  std::vector<std::array<int32_t, 2>> near_;
  std::vector<int64_t> counted_;  ///< The visit in which near_ was counted.
  int64_t visit_ = 0;
  std::array<int32_t, 2> pair_{};
  double mean_halo_ = 1;
};

}  // namespace

void lower_halos(const Lists& graph, std::span<const double> weights, const Balance& balance,
                 int64_t num_parts, int rounds, std::vector<int32_t>& labels) {
  if (num_parts < 2) return;
  HaloSwaps swaps(graph, weights, balance, num_parts, labels);
  for (int round = 0; round < rounds; ++round) {
    if (!swaps.pass()) break;
  }
}

}  // namespace shardfield::graph
