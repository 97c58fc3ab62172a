#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "shardfield/graph/adjacency.h"
#include "shardfield/graph/mesh.h"

namespace shardfield::graph {

/// What makes two cells neighbours: a shared point, a shared facet, or centers at most a radius
/// apart.
enum class Contact { point, facet, radius };

/// Which cells of other parts a part also holds: `layers` steps of a breadth-first search from its
/// own cells over the contacts.
struct GhostRule {
  Contact contact = Contact::point;
  int64_t layers = 1;
  double radius = 0;  ///< For Contact::radius, in the unit of the coordinates.
};

/// @throws std::invalid_argument for negative layers, or a radius that does not suit the contact.
void check_ghost_rule(const GhostRule& rule);

/// Who touches whom in a mesh, prepared once. Refers to the mesh, which must outlive it.
class Neighbours {
 public:
  Neighbours(const Mesh& mesh, const GhostRule& rule, int num_threads);

  /// Calls visit(other) for every neighbour of `cell`; some may come twice, and `cell` itself may.
  template <class Visit>
  void for_each(int64_t cell, Visit&& visit) const {
    if (contact_ == Contact::point) {
      for (const int64_t node : mesh_->nodes_of(cell)) {
        for (const int64_t other : lists_[node]) visit(other);
      }
    } else if (contact_ == Contact::facet) {
      for (const int64_t other : lists_[cell]) visit(other);
    } else {
      within_radius(cell, visit);
    }
  }

  /// All neighbours as lists: each once, ascending, never the cell itself.
  [[nodiscard]] Lists lists(int num_threads) const;

 private:
  using Bin = std::array<int64_t, 3>;
  struct BinHash {
    size_t operator()(const Bin& bin) const;
  };
  [[nodiscard]] Bin bin_of(int64_t cell) const;
  [[nodiscard]] double distance2(int64_t a, int64_t b) const;
  void fill_bins(int num_threads);

  template <class Visit>
  void within_radius(int64_t cell, Visit&& visit) const {
    const Bin home = bin_of(cell);
    for (int64_t x = home[0] - 1; x <= home[0] + 1; ++x) {
      for (int64_t y = home[1] - 1; y <= home[1] + 1; ++y) {
        for (int64_t z = home[2] - 1; z <= home[2] + 1; ++z) {
          const auto found = bins_.find(Bin{x, y, z});
          if (found == bins_.end()) continue;
          for (const int64_t other : found->second) {
            if (distance2(cell, other) <= radius_ * radius_) visit(other);
          }
        }
      }
    }
  }

  const Mesh* mesh_;
  Contact contact_;
  double radius_;
  Lists lists_;  ///< Cells of each point, or across the facets of each cell.
  std::vector<double> centers_;
  std::unordered_map<Bin, std::vector<int64_t>, BinHash> bins_;
};

/// Ghost cells of one part, by layer and within a layer ascending.
struct Ghosts {
  std::vector<int64_t> cells;
  std::vector<int32_t> layers;  ///< 1 for the cells next to the part's own, 2 for those behind.
};

/// Finds the ghosts of every part. The same for any number of threads.
///
/// @param labels  part of each cell, 0 .. num_parts - 1
[[nodiscard]] std::vector<Ghosts> ghosts_of_parts(const Neighbours& neighbours,
                                                  std::span<const int32_t> labels,
                                                  int64_t num_parts, int64_t layers,
                                                  int num_threads);

/// Row p: the cells of part p, ascending.
[[nodiscard]] Lists cells_of_parts(std::span<const int32_t> labels, int64_t num_parts);

/// Number of ghosts of every part: the size of the halo that a model with this rule holds.
[[nodiscard]] std::vector<int64_t> halo_sizes(const Neighbours& neighbours,
                                              std::span<const int32_t> labels, int64_t num_parts,
                                              int64_t layers, int num_threads);

}  // namespace shardfield::graph
