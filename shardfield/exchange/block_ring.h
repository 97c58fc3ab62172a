#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/spec/mesh.h"

namespace shardfield::exchange {

/// Pieces as blocks that travel round their ranks, each as far as some rank needs it,
/// and what each rank adds to a block's gradient on its way back to the owner. At step s this rank
/// holds the block of the s-th rank before it in the ring's direction. Liu, Zaharia, Abbeel, "Ring
/// Attention with Blockwise Transformers for Near-Infinite Context" (ICLR 2024); here the gradients
/// go straight to their owners instead of once round.
class BlockRing {
 public:
  enum class Direction { kUp = 1, kDown = -1 };

  /// @param ranks      mesh rank that owns each block
  /// @param needed     needed[i][block]: by the owner of block i; equal on all ranks
  /// @param direction  from each rank to the next or to the one before
  BlockRing(const spec::Mesh& mesh, std::vector<int> ranks, std::vector<std::vector<bool>> needed,
            Direction direction = Direction::kUp);

  int size() const { return static_cast<int>(ranks_.size()); }
  int block_at(int step) const { return moved(own_, -step); }
  /// Whether the block passes here at all, be it only to go on.
  bool holds(int step) const { return passes(own_, step); }
  /// Whether this rank needs the block it holds.
  bool uses(int step) const { return needed_[own_][block_at(step)]; }
  /// Whether the rank `step` ranks on needs this rank's own block.
  bool is_used_after(int step) const { return needed_[moved(own_, step)][own_]; }

  /// Starts sending what this rank holds at `step` to the next rank and receiving what it will hold
  /// one step later, into contiguous `next` (empty when it holds none). Collective over the ring.
  comm::Exchange pass_on(int step, const std::vector<at::Tensor>& held,
                         const std::vector<at::Tensor>& next) const;
  /// Starts sending `parts`, made of the block held at `step` > 0, to its owner, and receiving
  /// those made of this rank's own block `step` ranks on. Either list may be empty. Collective
  /// likewise.
  comm::Exchange to_owner(int step, const std::vector<at::Tensor>& parts,
                          const std::vector<at::Tensor>& received) const;

 private:
  /// The position `steps` on in the ring's direction.
  int moved(int position, int steps) const {
    return (position + static_cast<int>(direction_) * steps + size()) % size();
  }
  /// Whether the block that started `step` ranks before `rank` reaches it.
  bool passes(int rank, int step) const;

  const spec::Mesh* mesh_;
  std::vector<int> ranks_;
  int own_;
  std::vector<std::vector<bool>> needed_;
  Direction direction_;
};

}  // namespace shardfield::exchange
