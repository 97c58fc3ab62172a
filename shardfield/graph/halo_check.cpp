// The checker of halo graphs: everything that cut_graph promises, looked at from the outside.
#include <algorithm>
#include <map>
#include <string>

#include "shardfield/graph/halo_graph.h"

namespace shardfield::graph {

namespace {

class Checker {
 public:
  Checker(const WholeGraph& graph, const std::vector<HaloPart>& parts)
      : graph_(graph), parts_(parts) {}

  std::vector<std::string> run() {
    if (static_cast<int64_t>(parts_.size()) != graph_.num_parts) {
      say("there are " + std::to_string(parts_.size()) + " parts; expected " +
          std::to_string(graph_.num_parts));
      return std::move(faults_);
    }
    for (size_t p = 0; p < parts_.size(); ++p) {
      if (parts_[p].part != static_cast<int64_t>(p) ||
          parts_[p].kinds.size() != graph_.owners.size() ||
          parts_[p].relations.size() != graph_.relations.size()) {
        say("part " + std::to_string(p) + " does not have the graph's kinds and relations");
        return std::move(faults_);
      }
    }
    for (size_t kind = 0; kind < graph_.owners.size(); ++kind) check_nodes(kind);
    if (!faults_.empty()) return std::move(faults_);  // local numbers mean nothing now
    for (size_t r = 0; r < graph_.relations.size(); ++r) check_links(r);
    for (size_t kind = 0; kind < graph_.owners.size(); ++kind) check_exchange(kind);
    return std::move(faults_);
  }

 private:
  static constexpr size_t kMostFaults = 20;

  void say(const std::string& fault) {
    if (faults_.size() < kMostFaults) faults_.push_back(fault);
  }

  static std::string name(const char* what, size_t number, int64_t part) {
    return std::string(what) + " " + std::to_string(number) + " on part " + std::to_string(part);
  }

  /// Every node is owned once, where its owner says; local lists hold distinct nodes.
  void check_nodes(size_t kind) {
    const auto owners = graph_.owners[kind];
    std::vector<int> times(owners.size());
    for (const HaloPart& part : parts_) {
      const LocalNodes& local = part.kinds[kind];
      if (local.owners.size() != local.nodes.size() || local.hops.size() != local.nodes.size() ||
          local.exchange.num_rows != static_cast<int64_t>(local.nodes.size())) {
        say(name("the lists of kind", kind, part.part) + " differ in length");
        continue;
      }
      std::map<int64_t, int> seen;
      for (size_t i = 0; i < local.nodes.size(); ++i) {
        const int64_t node = local.nodes[i];
        if (node < 0 || node >= static_cast<int64_t>(owners.size())) {
          say(name("local node", i, part.part) + " is node " + std::to_string(node) +
              ", which does not exist");
          continue;
        }
        if (seen[node]++ != 0) {
          say("node " + std::to_string(node) + " is twice on part " + std::to_string(part.part));
        }
        const bool own = static_cast<int64_t>(i) < local.exchange.num_owned;
        const int32_t owner = owners[static_cast<size_t>(node)];
        if (local.owners[i] != owner || own != (owner == part.part) ||
            own != (local.hops[i] == 0)) {
          say(name("local node", i, part.part) + " (node " + std::to_string(node) +
              ") is not told apart rightly from the halo: its owner is part " +
              std::to_string(owner));
        }
        times[static_cast<size_t>(node)] += static_cast<int>(own);
      }
    }
    for (size_t node = 0; node < times.size(); ++node) {
      if (times[node] != 1) {
        say("node " + std::to_string(node) + " of kind " + std::to_string(kind) + " is owned " +
            std::to_string(times[node]) + " times; expected once");
      }
    }
  }

  /// Links of every own node: the same as in the whole graph, in its order, with the right ends.
  void check_links(size_t r) {
    const Relation& relation = graph_.relations[r];
    std::vector<std::vector<int64_t>> expected(
        graph_.owners[static_cast<size_t>(relation.target_kind)].size());
    for (size_t link = 0; link < relation.targets.size(); ++link) {
      expected[static_cast<size_t>(relation.targets[link])].push_back(static_cast<int64_t>(link));
    }
    for (const HaloPart& part : parts_) {
      const LocalLinks& local = part.relations[r];
      if (local.sources.size() != local.links.size() ||
          local.targets.size() != local.links.size()) {
        say(name("the lists of relation", r, part.part) + " differ in length");
        continue;
      }
      check_ends(relation, part, local);
      check_neighbourhoods(relation, part, local, expected);
      check_degrees(relation, part, local, expected);
    }
  }

  void check_ends(const Relation& relation, const HaloPart& part, const LocalLinks& local) {
    const LocalNodes& sources = part.kinds[static_cast<size_t>(relation.source_kind)];
    const LocalNodes& targets = part.kinds[static_cast<size_t>(relation.target_kind)];
    const auto means = [](const LocalNodes& nodes, int64_t at, int64_t node) {
      return at >= 0 && at < static_cast<int64_t>(nodes.nodes.size()) &&
             nodes.nodes[static_cast<size_t>(at)] == node;
    };
    for (size_t i = 0; i < local.links.size(); ++i) {
      const int64_t link = local.links[i];
      const bool exists = link >= 0 && link < static_cast<int64_t>(relation.sources.size());
      if (!exists ||
          !means(sources, local.sources[i], relation.sources[static_cast<size_t>(link)]) ||
          !means(targets, local.targets[i], relation.targets[static_cast<size_t>(link)])) {
        say(name("local link", i, part.part) + " does not join the nodes of link " +
            std::to_string(link));
        continue;
      }
      const bool interior = sources.hops[static_cast<size_t>(local.sources[i])] == 0;
      if (interior != (static_cast<int64_t>(i) < local.num_interior)) {
        say(name("local link", i, part.part) + " is on the wrong side of the interior");
      }
    }
  }

  void check_neighbourhoods(const Relation& relation, const HaloPart& part, const LocalLinks& local,
                            const std::vector<std::vector<int64_t>>& expected) {
    const LocalNodes& targets = part.kinds[static_cast<size_t>(relation.target_kind)];
    std::vector<std::vector<int64_t>> got(static_cast<size_t>(targets.exchange.num_owned));
    for (size_t i = 0; i < local.links.size(); ++i) {
      if (local.targets[i] >= 0 && local.targets[i] < targets.exchange.num_owned) {
        got[static_cast<size_t>(local.targets[i])].push_back(local.links[i]);
      }
    }
    for (size_t i = 0; i < got.size(); ++i) {
      std::sort(got[i].begin(), got[i].end());
      const auto& wanted = expected[static_cast<size_t>(targets.nodes[i])];
      if (got[i] == wanted) continue;
      say("node " + std::to_string(targets.nodes[i]) + " has " + std::to_string(got[i].size()) +
          " links into it on its part " + std::to_string(part.part) + ", in the whole graph " +
          std::to_string(wanted.size()) + ", or other ones");
    }
  }

  void check_degrees(const Relation& relation, const HaloPart& part, const LocalLinks& local,
                     const std::vector<std::vector<int64_t>>& expected) {
    const auto& targets = part.kinds[static_cast<size_t>(relation.target_kind)].nodes;
    const auto& sources = part.kinds[static_cast<size_t>(relation.source_kind)].nodes;
    std::vector<int64_t> out(graph_.owners[static_cast<size_t>(relation.source_kind)].size());
    for (const int64_t source : relation.sources) ++out[static_cast<size_t>(source)];
    bool right =
        local.in_degrees.size() == targets.size() && local.out_degrees.size() == sources.size();
    for (size_t i = 0; right && i < targets.size(); ++i) {
      right = local.in_degrees[i] ==
              static_cast<int64_t>(expected[static_cast<size_t>(targets[i])].size());
    }
    for (size_t i = 0; right && i < sources.size(); ++i) {
      right = local.out_degrees[i] == out[static_cast<size_t>(sources[i])];
    }
    if (!right) {
      say("the degrees on part " + std::to_string(part.part) + " are not those of the whole graph");
    }
  }

  /// Plays the exchange on node numbers: every halo row must end up with its own.
  void check_exchange(size_t kind) {
    for (const HaloPart& part : parts_) {
      const LocalNodes& local = part.kinds[kind];
      std::vector<int64_t> got(local.nodes.size(), -1);
      std::copy_n(local.nodes.begin(), local.exchange.num_owned, got.begin());
      for (const RowsFrom& from : local.exchange.receives) receive(kind, part.part, from, got);
      if (got != local.nodes) {
        say("the exchange of kind " + std::to_string(kind) + " does not bring part " +
            std::to_string(part.part) + " the rows of its halo");
      }
      for (const RowsTo& to : local.exchange.sends) {
        const auto& peer = parts_[static_cast<size_t>(to.part)].kinds[kind].exchange.receives;
        const bool expected = std::any_of(
            peer.begin(), peer.end(), [&](const RowsFrom& from) { return from.part == part.part; });
        if (!expected) {
          say("part " + std::to_string(part.part) + " sends to part " + std::to_string(to.part) +
              ", which does not receive from it");
        }
      }
    }
  }

  void receive(size_t kind, int64_t part, const RowsFrom& from, std::vector<int64_t>& got) {
    const LocalNodes& owner = parts_[static_cast<size_t>(from.part)].kinds[kind];
    for (const RowsTo& to : owner.exchange.sends) {
      if (to.part != part || static_cast<int64_t>(to.rows.size()) != from.count) continue;
      for (int64_t i = 0; i < from.count; ++i) {
        const int64_t row = to.rows[static_cast<size_t>(i)];
        if (row >= 0 && row < owner.exchange.num_owned) {
          got[static_cast<size_t>(from.begin + i)] = owner.nodes[static_cast<size_t>(row)];
        }
      }
    }
  }

  const WholeGraph& graph_;
  const std::vector<HaloPart>& parts_;
  std::vector<std::string> faults_;
};

}  // namespace

std::vector<std::string> faults_of(const WholeGraph& graph, const std::vector<HaloPart>& parts) {
  return Checker(graph, parts).run();
}

}  // namespace shardfield::graph
