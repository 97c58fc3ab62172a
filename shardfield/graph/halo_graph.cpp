#include "shardfield/graph/halo_graph.h"

#include <algorithm>
#include <stdexcept>

namespace shardfield::graph {

namespace {

[[noreturn]] void fail(const std::string& text) {
  throw std::invalid_argument("halo graph: " + text);
}

void check_whole(const WholeGraph& graph) {
  const auto num_kinds = static_cast<int64_t>(graph.owners.size());
  for (size_t r = 0; r < graph.relations.size(); ++r) {
    const Relation& relation = graph.relations[r];
    if (relation.source_kind < 0 || relation.source_kind >= num_kinds || relation.target_kind < 0 ||
        relation.target_kind >= num_kinds) {
      fail("relation " + std::to_string(r) + " joins kinds of nodes that do not exist");
    }
    if (relation.sources.size() != relation.targets.size()) {
      fail("relation " + std::to_string(r) + " has " + std::to_string(relation.sources.size()) +
           " sources and " + std::to_string(relation.targets.size()) + " targets");
    }
    const auto check = [&](std::span<const int64_t> ends, int64_t kind, const char* what) {
      const auto count = static_cast<int64_t>(graph.owners[static_cast<size_t>(kind)].size());
      for (size_t i = 0; i < ends.size(); ++i) {
        if (ends[i] >= 0 && ends[i] < count) continue;
        fail("link " + std::to_string(i) + " of relation " + std::to_string(r) + " has " + what +
             " " + std::to_string(ends[i]) + "; expected 0 to " + std::to_string(count - 1));
      }
    };
    check(relation.sources, relation.source_kind, "source");
    check(relation.targets, relation.target_kind, "target");
  }
  for (const auto owners : graph.owners) {
    check_labels(owners, static_cast<int64_t>(owners.size()), graph.num_parts, "node");
  }
}

/// Row t: the links into target t, ascending.
Lists links_into(const Relation& relation, int64_t num_targets) {
  Lists lists;
  lists.offsets.assign(static_cast<size_t>(num_targets) + 1, 0);
  for (const int64_t target : relation.targets) ++lists.offsets[static_cast<size_t>(target) + 1];
  for (size_t i = 1; i < lists.offsets.size(); ++i) lists.offsets[i] += lists.offsets[i - 1];
  lists.targets.resize(relation.targets.size());
  std::vector<int64_t> place(lists.offsets.begin(), lists.offsets.end() - 1);
  for (size_t link = 0; link < relation.targets.size(); ++link) {
    int64_t& at = place[static_cast<size_t>(relation.targets[link])];
    lists.targets[static_cast<size_t>(at++)] = static_cast<int64_t>(link);
  }
  return lists;
}

std::vector<int64_t> count_ends(std::span<const int64_t> ends, size_t num_nodes) {
  std::vector<int64_t> counts(num_nodes);
  for (const int64_t node : ends) ++counts[static_cast<size_t>(node)];
  return counts;
}

std::vector<int64_t> pick(const std::vector<int64_t>& values, const std::vector<int64_t>& rows) {
  std::vector<int64_t> picked;
  picked.reserve(rows.size());
  for (const int64_t row : rows) picked.push_back(values[static_cast<size_t>(row)]);
  return picked;
}

/// Own rows first, then by (owner, number).
void sort_nodes(LocalNodes& nodes, std::span<const int32_t> owners, int64_t part,
                const std::vector<int32_t>& hop_of) {
  const auto key = [&](int64_t node) {
    const int32_t owner = owners[static_cast<size_t>(node)];
    return std::pair<int64_t, int64_t>(owner == part ? -1 : owner, node);
  };
  std::sort(nodes.nodes.begin(), nodes.nodes.end(),
            [&](int64_t a, int64_t b) { return key(a) < key(b); });
  for (const int64_t node : nodes.nodes) {
    nodes.owners.push_back(owners[static_cast<size_t>(node)]);
    nodes.hops.push_back(hop_of[static_cast<size_t>(node)]);
  }
}

/// Grows parts one after the other; scratch memory is kept between them.
class Cutter {
 public:
  Cutter(const WholeGraph& graph, int64_t hops) : graph_(graph), hops_(hops) {
    for (const auto owners : graph.owners) {
      own_.push_back(cells_of_parts(owners, graph.num_parts));
      hop_of_.emplace_back(owners.size(), -1);
      local_.emplace_back(owners.size(), -1);
    }
    for (const Relation& relation : graph.relations) {
      into_.push_back(links_into(relation, num_nodes(relation.target_kind)));
      out_degrees_.push_back(count_ends(relation.sources, owners_of(relation.source_kind).size()));
      in_degrees_.push_back(count_ends(relation.targets, owners_of(relation.target_kind).size()));
    }
  }

  HaloPart cut(int64_t part) {
    HaloPart out;
    out.part = part;
    out.kinds.resize(graph_.owners.size());
    std::vector<std::vector<int64_t>> frontier(graph_.owners.size());
    for (size_t kind = 0; kind < frontier.size(); ++kind) {
      const auto own = own_[kind][part];
      frontier[kind].assign(own.begin(), own.end());
      add(out, frontier, kind, 0);
    }
    std::vector<std::vector<int64_t>> links(graph_.relations.size());
    for (int32_t hop = 1; hop <= hops_; ++hop) frontier = step(out, links, frontier, hop);
    for (size_t kind = 0; kind < out.kinds.size(); ++kind) {
      LocalNodes& nodes = out.kinds[kind];
      sort_nodes(nodes, graph_.owners[kind], part, hop_of_[kind]);
      for (size_t i = 0; i < nodes.nodes.size(); ++i) {
        local_[kind][static_cast<size_t>(nodes.nodes[i])] = static_cast<int64_t>(i);
      }
    }
    for (size_t r = 0; r < links.size(); ++r) {
      out.relations.push_back(local_links(out, r, std::move(links[r])));
    }
    forget(out);
    return out;
  }

 private:
  [[nodiscard]] std::span<const int32_t> owners_of(int64_t kind) const {
    return graph_.owners[static_cast<size_t>(kind)];
  }
  [[nodiscard]] int64_t num_nodes(int64_t kind) const {
    return static_cast<int64_t>(owners_of(kind).size());
  }

  void add(HaloPart& out, const std::vector<std::vector<int64_t>>& found, size_t kind,
           int32_t hop) {
    for (const int64_t node : found[kind]) {
      hop_of_[kind][static_cast<size_t>(node)] = hop;
      out.kinds[kind].nodes.push_back(node);
    }
  }

  /// All links into the frontier; their sources that are new are the next one.
  std::vector<std::vector<int64_t>> step(HaloPart& out, std::vector<std::vector<int64_t>>& links,
                                         const std::vector<std::vector<int64_t>>& frontier,
                                         int32_t hop) {
    std::vector<std::vector<int64_t>> next(frontier.size());
    for (size_t r = 0; r < links.size(); ++r) {
      const Relation& relation = graph_.relations[r];
      const auto source_kind = static_cast<size_t>(relation.source_kind);
      for (const int64_t target : frontier[static_cast<size_t>(relation.target_kind)]) {
        for (const int64_t link : into_[r][target]) {
          links[r].push_back(link);
          const int64_t source = relation.sources[static_cast<size_t>(link)];
          int32_t& known = hop_of_[source_kind][static_cast<size_t>(source)];
          if (known != -1) continue;
          known = hop;
          next[source_kind].push_back(source);
        }
      }
    }
    for (size_t kind = 0; kind < next.size(); ++kind) add(out, next, kind, hop);
    return next;
  }

  LocalLinks local_links(const HaloPart& out, size_t r, std::vector<int64_t> links) {
    const Relation& relation = graph_.relations[r];
    const auto source_kind = static_cast<size_t>(relation.source_kind);
    const auto target_kind = static_cast<size_t>(relation.target_kind);
    std::sort(links.begin(), links.end());
    const auto middle = std::stable_partition(links.begin(), links.end(), [&](int64_t link) {
      const int64_t source = relation.sources[static_cast<size_t>(link)];
      return graph_.owners[source_kind][static_cast<size_t>(source)] == out.part;
    });
    LocalLinks local;
    local.num_interior = middle - links.begin();
    for (const int64_t link : links) {
      const auto at = static_cast<size_t>(link);
      local.sources.push_back(local_[source_kind][static_cast<size_t>(relation.sources[at])]);
      local.targets.push_back(local_[target_kind][static_cast<size_t>(relation.targets[at])]);
      local.target_hops.push_back(hop_of_[target_kind][static_cast<size_t>(relation.targets[at])]);
    }
    local.links = std::move(links);
    local.out_degrees = pick(out_degrees_[r], out.kinds[source_kind].nodes);
    local.in_degrees = pick(in_degrees_[r], out.kinds[target_kind].nodes);
    return local;
  }

  void forget(const HaloPart& out) {
    for (size_t kind = 0; kind < out.kinds.size(); ++kind) {
      for (const int64_t node : out.kinds[kind].nodes) {
        hop_of_[kind][static_cast<size_t>(node)] = -1;
        local_[kind][static_cast<size_t>(node)] = -1;
      }
    }
  }

  const WholeGraph& graph_;
  int64_t hops_;
  std::vector<Lists> own_;
  std::vector<Lists> into_;
  std::vector<std::vector<int64_t>> out_degrees_;
  std::vector<std::vector<int64_t>> in_degrees_;
  std::vector<std::vector<int32_t>> hop_of_;
  std::vector<std::vector<int64_t>> local_;
};

}  // namespace

std::vector<HaloPart> cut_graph(const WholeGraph& graph, int64_t hops) {
  if (hops < 1) fail("expected at least 1 hop, got " + std::to_string(hops));
  check_whole(graph);
  Cutter cutter(graph, hops);
  std::vector<HaloPart> parts;
  for (int64_t part = 0; part < graph.num_parts; ++part) parts.push_back(cutter.cut(part));
  for (size_t kind = 0; kind < graph.owners.size(); ++kind) {
    std::vector<std::span<const int64_t>> rows;
    for (const HaloPart& part : parts) rows.emplace_back(part.kinds[kind].nodes);
    std::vector<ExchangePlan> plans = plan_exchanges(rows, graph.owners[kind]);
    for (size_t p = 0; p < parts.size(); ++p) {
      parts[p].kinds[kind].exchange = std::move(plans[p]);
    }
  }
  return parts;
}

HaloCost cost_of(const std::vector<HaloPart>& parts, int64_t num_layers, bool exchange_per_layer) {
  HaloCost cost;
  const int64_t exchanges = exchange_per_layer ? num_layers : 1;
  for (const HaloPart& part : parts) {
    for (const LocalNodes& nodes : part.kinds) {
      cost.exchanged_rows += (nodes.exchange.num_rows - nodes.exchange.num_owned) * exchanges;
    }
    if (exchange_per_layer) continue;
    for (const LocalLinks& relation : part.relations) {
      for (const int32_t hop : relation.target_hops) {
        if (hop > 0) cost.redundant_links += std::max<int64_t>(0, num_layers - hop);
      }
    }
  }
  return cost;
}

}  // namespace shardfield::graph
