#include "shardfield/exchange/cut_ranks.h"

#include <algorithm>

namespace shardfield::exchange {

std::vector<int> ranks_over(const spec::Mesh& mesh, const std::vector<int>& axes) {
  std::vector<int> ranks;
  for (int r = 0; r < mesh.size(); ++r) {
    const auto coord = mesh.coord_of(r);
    bool along = true;
    for (int a = 0; a < mesh.num_axes(); ++a)
      along &= std::ranges::find(axes, a) != axes.end() || coord[a] == mesh.coord[a];
    if (along) ranks.push_back(r);
  }
  return ranks;
}

std::vector<int> ranks_along(const spec::Layout& layout, size_t c) {
  const spec::Cut& cut = layout.cuts()[c];
  const spec::Mesh& mesh = layout.mesh();
  std::vector<int> ranks(cut.sizes.size());
  for (const int r : ranks_over(mesh, cut.axes)) ranks[cut.piece_at(mesh, mesh.coord_of(r))] = r;
  return ranks;
}

}  // namespace shardfield::exchange
