#include "shardfield/spec/mesh.h"

namespace shardfield::spec {

int Mesh::size() const {
  int64_t n = 1;
  for (int64_t s : shape) n *= s;
  return static_cast<int>(n);
}

int Mesh::rank_at(const std::vector<int64_t>& at) const {
  int64_t r = 0;
  for (size_t a = 0; a < shape.size(); ++a) r = r * shape[a] + at[a];
  return static_cast<int>(r);
}

std::vector<int64_t> Mesh::coord_of(int mesh_rank) const {
  std::vector<int64_t> at(shape.size());
  int64_t r = mesh_rank;
  for (size_t a = shape.size(); a-- > 0;) {
    at[a] = r % shape[a];
    r /= shape[a];
  }
  return at;
}

}  // namespace shardfield::spec
