#include "shardfield/exchange/cut_ranks.h"

#include <algorithm>

namespace shardfield::exchange {

std::vector<int> ranks_along(const spec::Layout& layout, size_t c) {
  const spec::Cut& cut = layout.cuts()[c];
  const spec::Mesh& mesh = layout.mesh();
  std::vector<int> ranks(cut.sizes.size());
  for (int r = 0; r < mesh.size(); ++r) {
    const auto coord = mesh.coord_of(r);
    bool along = true;
    for (int a = 0; a < mesh.num_axes(); ++a)
      along &= std::ranges::find(cut.axes, a) != cut.axes.end() || coord[a] == mesh.coord[a];
    if (along) ranks[cut.piece_at(mesh, coord)] = r;
  }
  return ranks;
}

}  // namespace shardfield::exchange
