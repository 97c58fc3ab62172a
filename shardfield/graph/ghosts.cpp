#include "shardfield/graph/ghosts.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>

#include "shardfield/graph/parallel.h"

namespace shardfield::graph {

namespace {

/// Sorted, each once.
void make_set(std::vector<int64_t>& cells) {
  std::sort(cells.begin(), cells.end());
  cells.erase(std::unique(cells.begin(), cells.end()), cells.end());
}

/// Own cells of every part that touch another part.
std::vector<uint8_t> border_flags(const Neighbours& neighbours, std::span<const int32_t> labels,
                                  int num_threads) {
  std::vector<uint8_t> flags(labels.size());
  parallel_ranges(static_cast<int64_t>(labels.size()), num_threads,
                  [&](int64_t begin, int64_t end) {
                    for (int64_t cell = begin; cell < end; ++cell) {
                      const int32_t own = labels[static_cast<size_t>(cell)];
                      uint8_t& flag = flags[static_cast<size_t>(cell)];
                      neighbours.for_each(cell, [&](int64_t other) {
                        flag |= static_cast<uint8_t>(labels[static_cast<size_t>(other)] != own);
                      });
                    }
                  });
  return flags;
}

Ghosts grow(const Neighbours& neighbours, std::span<const int32_t> labels, int32_t part,
            std::vector<int64_t> frontier, int64_t layers) {
  Ghosts ghosts;
  std::vector<int64_t> known;
  for (int64_t layer = 1; layer <= layers && !frontier.empty(); ++layer) {
    std::vector<int64_t> reached;
    for (const int64_t cell : frontier) {
      neighbours.for_each(cell, [&](int64_t other) {
        if (labels[static_cast<size_t>(other)] != part) reached.push_back(other);
      });
    }
    make_set(reached);
    frontier.clear();
    std::set_difference(reached.begin(), reached.end(), known.begin(), known.end(),
                        std::back_inserter(frontier));
    ghosts.cells.insert(ghosts.cells.end(), frontier.begin(), frontier.end());
    ghosts.layers.resize(ghosts.cells.size(), static_cast<int32_t>(layer));
    const auto middle = static_cast<std::ptrdiff_t>(known.size());
    known.insert(known.end(), frontier.begin(), frontier.end());
    std::inplace_merge(known.begin(), known.begin() + middle, known.end());
  }
  return ghosts;
}

}  // namespace

void check_ghost_rule(const GhostRule& rule) {
  if (rule.layers < 0) {
    throw std::invalid_argument("partition: expected ghost_layers of 0 or more, got " +
                                std::to_string(rule.layers));
  }
  const bool by_radius = rule.contact == Contact::radius;
  if (by_radius && !(rule.radius > 0 && std::isfinite(rule.radius))) {
    throw std::invalid_argument(
        "partition: ghosts by radius need a positive, finite radius in the unit of the "
        "coordinates, got " +
        std::to_string(rule.radius));
  }
  if (!by_radius && rule.radius != 0) {
    throw std::invalid_argument("partition: a radius of " + std::to_string(rule.radius) +
                                " was given, but ghosts are not found by radius; ask for contact "
                                "\"radius\" or leave the radius out");
  }
}

Neighbours::Neighbours(const Mesh& mesh, const GhostRule& rule, int num_threads)
    : mesh_(&mesh), contact_(rule.contact), radius_(rule.radius) {
  check_ghost_rule(rule);
  switch (contact_) {
    case Contact::point:
      lists_ = cells_of_points(mesh);
      break;
    case Contact::facet:
      lists_ = cells_across_facets(mesh, num_threads);
      break;
    case Contact::radius:
      fill_bins(num_threads);
      break;
  }
}

size_t Neighbours::BinHash::operator()(const Bin& bin) const {
  uint64_t hash = 0;
  for (const int64_t x : bin) hash = (hash ^ static_cast<uint64_t>(x)) * 0x9e3779b97f4a7c15ULL;
  return static_cast<size_t>(hash ^ (hash >> 32));
}

Neighbours::Bin Neighbours::bin_of(int64_t cell) const {
  Bin bin{};
  for (size_t axis = 0; axis < 3; ++axis) {
    bin[axis] =
        static_cast<int64_t>(std::floor(centers_[static_cast<size_t>(cell) * 3 + axis] / radius_));
  }
  return bin;
}

double Neighbours::distance2(int64_t a, int64_t b) const {
  double sum = 0;
  for (size_t axis = 0; axis < 3; ++axis) {
    const double d =
        centers_[static_cast<size_t>(a) * 3 + axis] - centers_[static_cast<size_t>(b) * 3 + axis];
    sum += d * d;
  }
  return sum;
}

void Neighbours::fill_bins(int num_threads) {
  centers_ = mesh_->centroids(num_threads);
  double farthest = 0;
  for (const double x : centers_) farthest = std::max(farthest, std::abs(x));
  if (farthest / radius_ > 1e15) {
    throw std::invalid_argument("partition: a radius of " + std::to_string(radius_) +
                                " is lost in rounding beside coordinates of " +
                                std::to_string(farthest) + "; use a larger one");
  }
  for (int64_t cell = 0; cell < mesh_->num_cells(); ++cell) bins_[bin_of(cell)].push_back(cell);
}

Lists Neighbours::lists(int num_threads) const {
  if (contact_ == Contact::facet) return lists_;
  if (contact_ == Contact::point) return cells_around(*mesh_, lists_, num_threads);
  Lists lists;
  lists.offsets.reserve(static_cast<size_t>(mesh_->num_cells()) + 1);
  for (int64_t cell = 0; cell < mesh_->num_cells(); ++cell) {
    const auto first = static_cast<std::ptrdiff_t>(lists.targets.size());
    for_each(cell, [&](int64_t other) {
      if (other != cell) lists.targets.push_back(other);
    });
    std::sort(lists.targets.begin() + first, lists.targets.end());
    lists.offsets.push_back(static_cast<int64_t>(lists.targets.size()));
  }
  return lists;
}

Lists cells_of_parts(std::span<const int32_t> labels, int64_t num_parts) {
  Lists lists;
  lists.offsets.assign(static_cast<size_t>(num_parts) + 1, 0);
  for (const int32_t part : labels) ++lists.offsets[static_cast<size_t>(part) + 1];
  for (size_t p = 1; p < lists.offsets.size(); ++p) lists.offsets[p] += lists.offsets[p - 1];
  lists.targets.resize(labels.size());
  std::vector<int64_t> place(lists.offsets.begin(), lists.offsets.end() - 1);
  for (size_t cell = 0; cell < labels.size(); ++cell) {
    auto& at = place[static_cast<size_t>(labels[cell])];
    lists.targets[static_cast<size_t>(at++)] = static_cast<int64_t>(cell);
  }
  return lists;
}

std::vector<Ghosts> ghosts_of_parts(const Neighbours& neighbours, std::span<const int32_t> labels,
                                    int64_t num_parts, int64_t layers, int num_threads) {
  std::vector<Ghosts> ghosts(static_cast<size_t>(num_parts));
  if (layers == 0) return ghosts;
  const std::vector<uint8_t> border = border_flags(neighbours, labels, num_threads);
  const Lists own = cells_of_parts(labels, num_parts);
  parallel_items(num_parts, num_threads, [&](int64_t part, int) {
    std::vector<int64_t> frontier;
    for (const int64_t cell : own[part]) {
      if (border[static_cast<size_t>(cell)] != 0) frontier.push_back(cell);
    }
    ghosts[static_cast<size_t>(part)] =
        grow(neighbours, labels, static_cast<int32_t>(part), std::move(frontier), layers);
  });
  return ghosts;
}

std::vector<int64_t> halo_sizes(const Neighbours& neighbours, std::span<const int32_t> labels,
                                int64_t num_parts, int64_t layers, int num_threads) {
  std::vector<int64_t> sizes;
  for (const Ghosts& ghosts : ghosts_of_parts(neighbours, labels, num_parts, layers, num_threads)) {
    sizes.push_back(static_cast<int64_t>(ghosts.cells.size()));
  }
  return sizes;
}

}  // namespace shardfield::graph
