#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shardfield/graph/adjacency.h"
#include "shardfield/graph/pieces.h"

namespace shardfield::graph {

/// Links from nodes of one kind to nodes of the same or another kind, in the caller's order.
/// Repeated links and self-loops are links like any other.
struct Relation {
  int64_t source_kind = 0;
  int64_t target_kind = 0;
  std::span<const int64_t> sources;  ///< Node numbers of the source kind, one per link.
  std::span<const int64_t> targets;  ///< Node numbers of the target kind.
};

/// A whole graph: how many nodes of each kind, who owns them, and the links between them.
/// Refers to the caller's arrays, which must outlive it.
struct WholeGraph {
  std::vector<std::span<const int32_t>> owners;  ///< Per kind: owner of each node.
  std::vector<Relation> relations;
  int64_t num_parts = 1;
};

/// One kind of nodes on one part: own nodes by number, then halo nodes by (owner, number).
struct LocalNodes {
  std::vector<int64_t> nodes;  ///< Number of each local node in the whole graph.
  std::vector<int32_t> owners;
  std::vector<int32_t> hops;  ///< 0 for own nodes, else links to the nearest own node.
  ExchangePlan exchange;
};

/// One relation on one part: links between local nodes. Those from own nodes come first, so that
/// they can be worked on while the halo travels; within both groups the caller's order is kept,
/// so sums run in the serial order.
struct LocalLinks {
  std::vector<int64_t> links;    ///< Number of each link in the whole graph.
  std::vector<int64_t> sources;  ///< Local node numbers.
  std::vector<int64_t> targets;
  std::vector<int32_t> target_hops;  ///< Hops of each link's target; 0 where the part owns it.
  int64_t num_interior = 0;          ///< Links 0 .. num_interior - 1 need no halo.
  /// Links in the whole graph out of each local source, and into each local target.
  std::vector<int64_t> out_degrees;
  std::vector<int64_t> in_degrees;
};

/// What one part holds.
struct HaloPart {
  int64_t part = 0;
  std::vector<LocalNodes> kinds;
  std::vector<LocalLinks> relations;
};

/// Cuts a graph so that every part can compute `hops` layers of message passing on its own nodes
/// after one exchange: it holds all links into nodes less than `hops` links upstream of its own,
/// and the sources of those. One hop is for an exchange per layer. Local; the same at every call.
///
/// @throws std::invalid_argument for hops < 1, links whose ends do not exist, owners that are no
///   parts; the message names the link or node.
///
/// Example: links 0->1, 1->2 with owners 0, 0, 1. Part 0 holds nodes 0, 1 and link 0->1; part 1
/// holds node 2, halo node 1 and link 1->2; part 0 sends its local node 1 to part 1.
[[nodiscard]] std::vector<HaloPart> cut_graph(const WholeGraph& graph, int64_t hops);

/// What is wrong with parts of a graph, one sentence each; empty when all is right: own nodes
/// partition the nodes, every own node has exactly the links into it that the whole graph has, in
/// its order, local numbers mean what they should, degrees are those of the whole graph, and the
/// exchange plans of all parts match and bring every halo node its owner's row. Local.
[[nodiscard]] std::vector<std::string> faults_of(const WholeGraph& graph,
                                                 const std::vector<HaloPart>& parts);

/// What one pass over several layers costs, all parts together.
struct HaloCost {
  int64_t exchanged_rows = 0;   ///< Node rows that travel.
  int64_t redundant_links = 0;  ///< Links worked on by parts that do not own their targets.
};

/// The cost of `num_layers` layers with an exchange before each (`exchange_per_layer`, parts of one
/// hop), or with one exchange before all of them (parts of num_layers hops: layer l works on the
/// links into nodes up to num_layers - l hops away). Local.
[[nodiscard]] HaloCost cost_of(const std::vector<HaloPart>& parts, int64_t num_layers,
                               bool exchange_per_layer);

}  // namespace shardfield::graph
