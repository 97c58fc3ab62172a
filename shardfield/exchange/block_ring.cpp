#include "shardfield/exchange/block_ring.h"

#include <algorithm>

namespace shardfield::exchange {

namespace {

std::vector<comm::Message> messages(int peer, const std::vector<at::Tensor>& tensors) {
  std::vector<comm::Message> list;
  list.reserve(tensors.size());
  for (const at::Tensor& t : tensors) list.push_back({peer, t});
  return list;
}

}  // namespace

BlockRing::BlockRing(const spec::Mesh& mesh, std::vector<int> ranks,
                     std::vector<std::vector<bool>> needed, Direction direction)
    : mesh_(&mesh),
      ranks_(std::move(ranks)),
      own_(static_cast<int>(std::ranges::find(ranks_, mesh.rank) - ranks_.begin())),
      needed_(std::move(needed)),
      direction_(direction) {}

bool BlockRing::passes(int rank, int step) const {
  const int block = moved(rank, -step);
  for (int later = step; later < size(); ++later)
    if (needed_[moved(block, later)][block]) return true;
  return step == 0;
}

comm::Exchange BlockRing::pass_on(int step, const std::vector<at::Tensor>& held,
                                  const std::vector<at::Tensor>& next) const {
  const int after = moved(own_, 1);
  std::vector<comm::Message> sends;
  if (passes(after, step + 1)) sends = messages(ranks_[after], held);
  return comm::start_exchange(*mesh_, std::move(sends), messages(ranks_[block_at(1)], next));
}

comm::Exchange BlockRing::to_owner(int step, const std::vector<at::Tensor>& parts,
                                   const std::vector<at::Tensor>& received) const {
  return comm::start_exchange(*mesh_, messages(ranks_[block_at(step)], parts),
                              messages(ranks_[moved(own_, step)], received));
}

}  // namespace shardfield::exchange
