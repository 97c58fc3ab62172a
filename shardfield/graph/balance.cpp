#include "shardfield/graph/balance.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <queue>
#include <set>

namespace shardfield::graph {

namespace {

/// Moves weight between parts, keeping loads and who touches whom up to date.
class Repair {
 public:
  Repair(const Lists& graph, std::span<const double> weights, const Balance& balance,
         int64_t num_parts, std::vector<int32_t>& labels)
      : graph_(graph),
        weights_(weights),
        balance_(balance),
        labels_(labels),
        loads_(static_cast<size_t>(num_parts)) {
    for (size_t cell = 0; cell < labels.size(); ++cell) {
      loads_[static_cast<size_t>(labels[cell])] += weight_of(weights, static_cast<int64_t>(cell));
    }
  }

  void run() {
    // Every step moves at least one cell toward balance; the bound only guards against weights
    // that cannot be balanced at all.
    for (size_t step = 0; step < 8 * loads_.size() + 64; ++step) {
      const int32_t from = heaviest();
      const int32_t to = lightest();
      const bool too_heavy = load(from) > balance_.most + kSlack;
      const bool too_light = load(to) < balance_.least - kSlack;
      if (!too_heavy && !too_light) return;
      if (!ship(too_heavy, from, to)) return;
    }
  }

 private:
  static constexpr double kSlack = 1e-9;

  [[nodiscard]] double load(int32_t part) const { return loads_[static_cast<size_t>(part)]; }
  [[nodiscard]] int32_t heaviest() const {
    return static_cast<int32_t>(std::max_element(loads_.begin(), loads_.end()) - loads_.begin());
  }
  [[nodiscard]] int32_t lightest() const {
    return static_cast<int32_t>(std::min_element(loads_.begin(), loads_.end()) - loads_.begin());
  }

  [[nodiscard]] double mean() const {
    return std::accumulate(loads_.begin(), loads_.end(), 0.0) / static_cast<double>(loads_.size());
  }
  [[nodiscard]] bool has_room(int32_t part) const {
    return weights_.empty() ? load(part) + 1 <= balance_.most + kSlack : load(part) < mean();
  }
  [[nodiscard]] bool can_give(int32_t part) const {
    return weights_.empty() ? load(part) - 1 >= balance_.least - kSlack : load(part) > mean();
  }

  /// Parts that share a border, by part.
  [[nodiscard]] std::vector<std::set<int32_t>> touching_parts() const {
    std::vector<std::set<int32_t>> touching(loads_.size());
    for (int64_t cell = 0; cell < graph_.num_rows(); ++cell) {
      const int32_t own = labels_[static_cast<size_t>(cell)];
      for (const int64_t other : graph_[cell]) {
        const int32_t part = labels_[static_cast<size_t>(other)];
        if (part != own) touching[static_cast<size_t>(own)].insert(part);
      }
    }
    return touching;
  }

  /// Shortest chain of touching parts from `start` to a part that `wanted` accepts; empty if none.
  template <class Wanted>
  std::vector<int32_t> chain(int32_t start, Wanted&& wanted) const {
    const auto touching = touching_parts();
    std::vector<int32_t> before(loads_.size(), -1);
    before[static_cast<size_t>(start)] = start;
    std::queue<int32_t> queue({start});
    while (!queue.empty()) {
      const int32_t part = queue.front();
      queue.pop();
      if (part != start && wanted(part)) {
        std::vector<int32_t> path{part};
        while (path.back() != start) path.push_back(before[static_cast<size_t>(path.back())]);
        std::reverse(path.begin(), path.end());
        return path;
      }
      for (const int32_t next : touching[static_cast<size_t>(part)]) {
        if (before[static_cast<size_t>(next)] != -1) continue;
        before[static_cast<size_t>(next)] = part;
        queue.push(next);
      }
    }
    return {};
  }

  /// Takes weight out of the heaviest part, or into the lightest; true if something moved.
  bool ship(bool too_heavy, int32_t from, int32_t to) {
    double amount = 0;
    std::vector<int32_t> path;
    if (too_heavy) {
      path = chain(from, [&](int32_t part) { return has_room(part); });
      if (path.empty()) path = {from, to};
      amount = std::min(load(from) - balance_.most, balance_.most - load(path.back()));
      const double lacking = balance_.least - load(path.back());
      amount = std::max(amount, std::min(lacking, load(from) - balance_.least));
    } else {
      path = chain(to, [&](int32_t part) { return can_give(part); });
      if (path.empty()) path = {to, from};
      std::reverse(path.begin(), path.end());
      amount = std::min(balance_.least - load(to), load(path.front()) - balance_.least);
    }
    double moved = 0;
    for (size_t i = path.size() - 1; i > 0; --i) {
      moved += transfer(path[i - 1], path[i], std::max(amount, kSlack));
    }
    return moved > 0;
  }

  /// How much a cell belongs to `to` rather than to `from`.
  [[nodiscard]] int64_t pull(int64_t cell, int32_t from, int32_t to) const {
    int64_t sum = 0;
    for (const int64_t other : graph_[cell]) {
      const int32_t part = labels_[static_cast<size_t>(other)];
      sum += static_cast<int64_t>(part == to) - static_cast<int64_t>(part == from);
    }
    return sum;
  }

  /// Moves at least `amount` (up to one cell more) from one part to another, best cells first;
  /// cells that do not touch the target only when no other are left.
  double transfer(int32_t from, int32_t to, double amount) {
    struct Candidate {
      int64_t pull;
      int64_t cell;
      bool operator<(const Candidate& other) const {
        return pull != other.pull ? pull < other.pull : cell > other.cell;
      }
    };
    std::priority_queue<Candidate> heap;
    const auto touches = [&](int64_t cell) {
      for (const int64_t other : graph_[cell]) {
        if (labels_[static_cast<size_t>(other)] == to) return true;
      }
      return false;
    };
    const auto count = static_cast<int64_t>(labels_.size());
    for (int64_t cell = 0; cell < count; ++cell) {
      if (labels_[static_cast<size_t>(cell)] == from && touches(cell)) {
        heap.push({pull(cell, from, to), cell});
      }
    }
    double moved = 0;
    int64_t next_any = 0;
    while (moved < amount - kSlack) {
      int64_t cell = -1;
      while (!heap.empty() && cell < 0) {
        const Candidate best = heap.top();
        heap.pop();
        if (labels_[static_cast<size_t>(best.cell)] != from) continue;
        const int64_t now = pull(best.cell, from, to);
        if (now == best.pull) {
          cell = best.cell;
        } else {
          heap.push({now, best.cell});
        }
      }
      while (cell < 0 && next_any < count) {
        if (labels_[static_cast<size_t>(next_any)] == from) cell = next_any;
        ++next_any;
      }
      if (cell < 0) break;
      const double w = weight_of(weights_, cell);
      labels_[static_cast<size_t>(cell)] = to;
      loads_[static_cast<size_t>(from)] -= w;
      loads_[static_cast<size_t>(to)] += w;
      moved += w;
      for (const int64_t other : graph_[cell]) {
        if (labels_[static_cast<size_t>(other)] == from) {
          heap.push({pull(other, from, to), other});
        }
      }
    }
    return moved;
  }

  const Lists& graph_;
  std::span<const double> weights_;
  Balance balance_;
  std::vector<int32_t>& labels_;
  std::vector<double> loads_;
};

}  // namespace

void repair_balance(const Lists& graph, std::span<const double> weights, const Balance& balance,
                    int64_t num_parts, std::vector<int32_t>& labels) {
  Repair(graph, weights, balance, num_parts, labels).run();
}

Balance balance_of(std::span<const double> weights, int64_t num_cells, int64_t num_parts,
                   double tolerance) {
  const auto parts = static_cast<double>(num_parts);
  if (weights.empty()) {
    const double mean = static_cast<double>(num_cells) / parts;
    Balance balance{std::floor(mean), std::ceil(mean)};
    balance.most = std::max(balance.most, std::floor((1 + tolerance) * mean));
    balance.least = std::min(balance.least, std::ceil((1 - tolerance) * mean));
    if (num_cells >= num_parts) balance.least = std::max(balance.least, 1.0);
    return balance;
  }
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const double heaviest = *std::max_element(weights.begin(), weights.end());
  return {std::max(0.0, (1 - tolerance) * total / parts - heaviest),
          (1 + tolerance) * total / parts + heaviest};
}

}  // namespace shardfield::graph
