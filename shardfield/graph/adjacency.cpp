#include "shardfield/graph/adjacency.h"

#include <algorithm>
#include <array>

#include "shardfield/graph/parallel.h"

namespace shardfield::graph {

namespace {

struct Pair {
  int64_t from, to;
};

/// A facet as its lowest corner and a hash of all.
struct FacetKey {
  int64_t lowest;
  uint64_t hash;
};

struct FacetEntry {
  uint64_t hash;
  int64_t cell;
  friend auto operator<=>(const FacetEntry&, const FacetEntry&) = default;
};

uint64_t mix(uint64_t x) {
  x ^= x >> 30;
  x *= 0xbf58476d1ce4e5b9ULL;
  x ^= x >> 27;
  x *= 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

/// Independent of the order of the corners: sums of two different hashes of each.
template <class Corner>
FacetKey key_of(int count, Corner&& corner) {
  FacetKey key{corner(0), static_cast<uint64_t>(count)};
  for (int i = 0; i < count; ++i) {
    const int64_t node = corner(i);
    key.lowest = std::min(key.lowest, node);
    key.hash += mix(static_cast<uint64_t>(node) + 0x9e3779b97f4a7c15ULL);
  }
  return key;
}

FacetKey edge_key(int64_t a, int64_t b) {
  return key_of(2, [&](int i) { return i == 0 ? a : b; });
}

/// Calls visit(FacetKey) for every facet of a cell.
template <class Visit>
void for_each_facet(CellKind kind, std::span<const int64_t> nodes, Visit&& visit) {
  for (const Facet& facet : facets_of(kind)) {
    visit(key_of(facet.num_corners, [&](int i) {
      return nodes[static_cast<size_t>(facet.corners[static_cast<size_t>(i)])];
    }));
  }
  const size_t n = nodes.size();
  if (kind == CellKind::polygon) {
    for (size_t i = 0; i < n; ++i) visit(edge_key(nodes[i], nodes[(i + 1) % n]));
  } else if (kind == CellKind::triangle_strip) {
    for (size_t i = 0; i + 1 < n; ++i) visit(edge_key(nodes[i], nodes[i + 1]));
    for (size_t i = 0; i + 2 < n; ++i) visit(edge_key(nodes[i], nodes[i + 2]));
  } else if (kind == CellKind::poly_line) {
    visit(key_of(1, [&](int) { return nodes.front(); }));
    visit(key_of(1, [&](int) { return nodes.back(); }));
  }
}

/// The facets of a cell, and the cell itself where it may lie on the facet of a larger one.
template <class Visit>
void for_each_contact(CellKind kind, std::span<const int64_t> nodes, int cell_dim, Visit&& visit) {
  for_each_facet(kind, nodes, visit);
  const CellShape& shape = shape_of(kind);
  if (shape.dim + 1 != cell_dim) return;
  const int corners = shape.num_corners != 0 ? shape.num_corners : static_cast<int>(nodes.size());
  visit(key_of(corners, [&](int i) { return nodes[static_cast<size_t>(i)]; }));
}

/// Rows from pairs: counted, filled, sorted, repeats dropped.
Lists lists_of(int64_t num_rows, const std::vector<std::vector<Pair>>& runs) {
  std::vector<int64_t> offsets(static_cast<size_t>(num_rows) + 1);
  for (const auto& run : runs) {
    for (const Pair& pair : run) ++offsets[static_cast<size_t>(pair.from) + 1];
  }
  for (size_t i = 1; i < offsets.size(); ++i) offsets[i] += offsets[i - 1];
  std::vector<int64_t> targets(static_cast<size_t>(offsets.back()));
  std::vector<int64_t> place(offsets.begin(), offsets.end() - 1);
  for (const auto& run : runs) {
    for (const Pair& pair : run) {
      targets[static_cast<size_t>(place[static_cast<size_t>(pair.from)]++)] = pair.to;
    }
  }
  Lists lists;
  lists.offsets.assign(offsets.size(), 0);
  int64_t kept = 0;
  for (size_t row = 0; row + 1 < offsets.size(); ++row) {
    const auto begin = targets.begin() + offsets[row];
    const auto end = targets.begin() + offsets[row + 1];
    std::sort(begin, end);
    kept = std::unique_copy(begin, end, targets.begin() + kept) - targets.begin();
    lists.offsets[row + 1] = kept;
  }
  targets.resize(static_cast<size_t>(kept));
  lists.targets = std::move(targets);
  return lists;
}

/// Facets of all cells, sorted into the bucket of their lowest corner.
struct FacetBuckets {
  std::vector<int64_t> offsets;
  std::vector<FacetEntry> entries;
};

FacetBuckets facet_buckets(const Mesh& mesh) {
  FacetBuckets buckets;
  buckets.offsets.assign(static_cast<size_t>(mesh.num_points()) + 1, 0);
  const auto for_all = [&](auto&& visit) {
    mesh.for_each_cell(0, mesh.num_cells(), [&](int64_t cell, CellKind kind, auto nodes) {
      for_each_contact(kind, nodes, mesh.cell_dim(), [&](FacetKey key) { visit(cell, key); });
    });
  };
  for_all([&](int64_t, FacetKey key) { ++buckets.offsets[static_cast<size_t>(key.lowest) + 1]; });
  for (size_t i = 1; i < buckets.offsets.size(); ++i) buckets.offsets[i] += buckets.offsets[i - 1];
  buckets.entries.resize(static_cast<size_t>(buckets.offsets.back()));
  std::vector<int64_t> place(buckets.offsets.begin(), buckets.offsets.end() - 1);
  for_all([&](int64_t cell, FacetKey key) {
    const auto at = static_cast<size_t>(place[static_cast<size_t>(key.lowest)]++);
    buckets.entries[at] = {key.hash, cell};
  });
  return buckets;
}

/// All ordered pairs of distinct cells in runs of equal hash.
void pairs_of_bucket(std::span<FacetEntry> bucket, std::vector<Pair>& pairs) {
  std::sort(bucket.begin(), bucket.end());
  for (size_t begin = 0; begin < bucket.size();) {
    size_t end = begin + 1;
    while (end < bucket.size() && bucket[end].hash == bucket[begin].hash) ++end;
    for (size_t i = begin; i < end; ++i) {
      for (size_t j = begin; j < end; ++j) {
        if (bucket[i].cell != bucket[j].cell) pairs.push_back({bucket[i].cell, bucket[j].cell});
      }
    }
    begin = end;
  }
}

}  // namespace

Lists cells_of_points(const Mesh& mesh) {
  Lists lists;
  lists.offsets.assign(static_cast<size_t>(mesh.num_points()) + 1, 0);
  mesh.for_each_cell(0, mesh.num_cells(), [&](int64_t, CellKind, std::span<const int64_t> nodes) {
    for (const int64_t node : nodes) ++lists.offsets[static_cast<size_t>(node) + 1];
  });
  for (size_t i = 1; i < lists.offsets.size(); ++i) lists.offsets[i] += lists.offsets[i - 1];
  lists.targets.resize(static_cast<size_t>(lists.offsets.back()));
  std::vector<int64_t> place(lists.offsets.begin(), lists.offsets.end() - 1);
  mesh.for_each_cell(
      0, mesh.num_cells(), [&](int64_t cell, CellKind, std::span<const int64_t> nodes) {
        for (const int64_t node : nodes) {
          lists.targets[static_cast<size_t>(place[static_cast<size_t>(node)]++)] = cell;
        }
      });
  return lists;
}

Lists cells_across_facets(const Mesh& mesh, int num_threads) {
  FacetBuckets buckets = facet_buckets(mesh);
  const int64_t num_runs = std::clamp<int64_t>(mesh.num_points() / 4096, 1, 64);
  std::vector<std::vector<Pair>> runs(static_cast<size_t>(num_runs));
  parallel_items(num_runs, num_threads, [&](int64_t run, int) {
    for (int64_t p = mesh.num_points() * run / num_runs;
         p < mesh.num_points() * (run + 1) / num_runs; ++p) {
      const auto begin = static_cast<size_t>(buckets.offsets[static_cast<size_t>(p)]);
      const auto end = static_cast<size_t>(buckets.offsets[static_cast<size_t>(p) + 1]);
      pairs_of_bucket(std::span(buckets.entries).subspan(begin, end - begin),
                      runs[static_cast<size_t>(run)]);
    }
  });
  return lists_of(mesh.num_cells(), runs);
}

Lists cells_around(const Mesh& mesh, const Lists& cells_of_point, int num_threads) {
  const int64_t count = mesh.num_cells();
  const int64_t num_runs = std::clamp<int64_t>(count / 4096, 1, 64);
  std::vector<std::vector<int64_t>> runs(static_cast<size_t>(num_runs));
  Lists lists;
  lists.offsets.assign(static_cast<size_t>(count) + 1, 0);
  parallel_items(num_runs, num_threads, [&](int64_t run, int) {
    std::vector<int64_t>& found = runs[static_cast<size_t>(run)];
    mesh.for_each_cell(count * run / num_runs, count * (run + 1) / num_runs,
                       [&](int64_t cell, CellKind, std::span<const int64_t> nodes) {
                         const auto first = static_cast<std::ptrdiff_t>(found.size());
                         for (const int64_t node : nodes) {
                           for (const int64_t other : cells_of_point[node]) {
                             if (other != cell) found.push_back(other);
                           }
                         }
                         std::sort(found.begin() + first, found.end());
                         found.erase(std::unique(found.begin() + first, found.end()), found.end());
                         lists.offsets[static_cast<size_t>(cell) + 1] =
                             static_cast<int64_t>(found.size()) - first;
                       });
  });
  for (size_t i = 1; i < lists.offsets.size(); ++i) lists.offsets[i] += lists.offsets[i - 1];
  lists.targets.reserve(static_cast<size_t>(lists.offsets.back()));
  for (auto& run : runs) {
    lists.targets.insert(lists.targets.end(), run.begin(), run.end());
    std::vector<int64_t>().swap(run);
  }
  return lists;
}

Lists symmetric(const Lists& graph) {
  std::vector<std::vector<Pair>> runs(1);
  for (int64_t row = 0; row < graph.num_rows(); ++row) {
    for (const int64_t target : graph[row]) {
      if (target == row) continue;
      runs[0].push_back({row, target});
      runs[0].push_back({target, row});
    }
  }
  return lists_of(graph.num_rows(), runs);
}

}  // namespace shardfield::graph
