#pragma once

#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/comm/collectives.h"
#include "shardfield/spec/layout.h"
#include "shardfield/spec/range.h"

namespace shardfield::ops {

/// A block of a global tensor: one range per dim. Ranges may reach beyond the tensor (padding).
using Box = std::vector<spec::Range>;

Box intersect(const Box& a, const Box& b);
bool is_empty(const Box& box);
std::vector<int64_t> sizes_of_box(const Box& box);
/// The part of t that holds `part`, t holding `whole`. A view.
at::Tensor box_view(const at::Tensor& t, const Box& whole, const Box& part);
/// The blocks of `full` outside `core`: two per dim at most, disjoint. Just `full` when `core` is
/// empty.
std::vector<Box> shell_of(const Box& full, const Box& core);

/// Which blocks of its neighbours a rank needs beside its own piece, and what it sends them. Only
/// what is needed travels, each element once, straight from its owner (corners too).
struct HaloPlan {
  struct Part {
    int peer = 0;  ///< mesh rank
    Box box;
  };
  const spec::Mesh* mesh = nullptr;
  Box own;
  std::vector<Part> sends, receives;
  int64_t elements_moved = 0;  ///< received over all ranks
};

/// What one cut dim needs: a range of rows for each piece.
struct NeededRows {
  size_t cut = 0;
  std::vector<spec::Range> rows;
};

/// @param layout  simple layout of the tensor
/// @param needed  by cut; cuts that are not named need their own rows. A piece with an empty range
///                needs nothing at all.
HaloPlan plan_halo(const spec::Layout& layout, at::IntArrayRef sizes,
                   const std::vector<NeededRows>& needed);

/// A halo on its way: compact buffers, one per part.
class Halo {
 public:
  Halo() = default;
  /// Starts the transfers of the plan. Collective over the mesh.
  Halo(const HaloPlan& plan, const at::Tensor& piece);
  /// A halo that has arrived before.
  Halo(const HaloPlan& plan, std::vector<at::Tensor> parts)
      : plan_(&plan), parts_(std::move(parts)) {}

  void wait() { transfer_.wait(); }
  const std::vector<at::Tensor>& parts() const { return parts_; }
  /// Zeros of `box` with the values of `allowed` filled in, from the own piece and the halo.
  at::Tensor block(const Box& box, const Box& allowed, const at::Tensor& piece) const;

 private:
  const HaloPlan* plan_ = nullptr;
  std::vector<at::Tensor> parts_;
  comm::Exchange transfer_;
};

/// Gradient of a halo: starts sending each part to its owner; the sums arrive in `finish`.
class HaloReturn {
 public:
  HaloReturn(const HaloPlan& plan, std::vector<at::Tensor> parts, const at::TensorOptions& options);
  /// Adds what the neighbours sent into the gradient of the own piece.
  void finish(at::Tensor& grad);

 private:
  const HaloPlan* plan_;
  std::vector<at::Tensor> arriving_;
  comm::Exchange transfer_;
};

/// Drops rows at both ends of some dims of a fresh dense tensor inside its own memory: `box` is the
/// part that stays. Needs a thirtieth of the tensor beside it. Local.
at::Tensor compacted(const at::Tensor& t, const Box& box);

}  // namespace shardfield::ops
