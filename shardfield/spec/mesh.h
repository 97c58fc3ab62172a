#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace shardfield::spec {

/// A named grid of ranks and this rank's place in it. Ranks are numbered row-major (last axis
/// fastest). A mesh of shape (2, 3): rank 4 has coordinate (1, 1).
///
/// Meshes live as long as the process: layouts and tensors point at them.
struct Mesh {
  std::vector<int64_t> shape;
  std::vector<std::string> axis_names;
  std::vector<int64_t> coord;  ///< this rank's coordinate, one entry per axis
  int rank = 0;                ///< this rank's number inside the mesh
  int context = 0;  ///< which in-process rank owns the mesh (0 when a process is one rank)

  virtual ~Mesh() = default;

  int num_axes() const { return static_cast<int>(shape.size()); }
  int size() const;
  /// Rank at a coordinate.
  int rank_at(const std::vector<int64_t>& at) const;
  /// Coordinate of a rank.
  std::vector<int64_t> coord_of(int mesh_rank) const;
};

}  // namespace shardfield::spec
