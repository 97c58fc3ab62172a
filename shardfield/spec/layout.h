#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "shardfield/spec/mesh.h"

namespace shardfield::spec {

/// How one tensor dim is divided: piece i along the cut holds `sizes[i]` of its indices. Pieces
/// are numbered by the coordinates on `axes`, the first axis slowest, so two mesh axes on one dim
/// are one cut with four pieces.
///
/// A tensor dim may hold several cuts and an uncut outer factor after merging views: the dim reads
/// as [outer][cut 1][cut 2]..., the last cut fastest. Example: (b, n) -> (b * n) with n cut as
/// 3 + 2 keeps the cut {3, 2} and gains outer = b: a rank's elements are then b runs, not one.
struct Cut {
  int dim = 0;
  std::vector<int> axes;
  std::vector<int64_t> sizes;

  bool operator==(const Cut&) const = default;
  int64_t total() const;
  int64_t offset(int piece) const;
  /// The piece a coordinate owns on a mesh of this shape.
  int piece_at(const Mesh& mesh, const std::vector<int64_t>& coord) const;
};

/// Where every element of a sharded tensor lives. Interned: equal layouts are one object that is
/// never freed, so tensors hold a pointer and compare by address.
class Layout {
 public:
  const Mesh& mesh() const { return *mesh_; }
  const std::vector<Cut>& cuts() const { return cuts_; }
  /// Own piece number, piece size and piece offset of cut c.
  int piece(size_t c) const { return pieces_[c]; }
  int64_t local_size(size_t c) const { return cuts_[c].sizes[pieces_[c]]; }
  int64_t local_offset(size_t c) const { return offsets_[c]; }

  /// True when no dim has two cuts (outer factors depend on the sizes: see is_simple).
  bool has_single_cuts() const { return single_cuts_; }
  /// True when every cut divides its whole dim: plain blocks, as in Shard(dim).
  bool is_simple(const int64_t* global_sizes) const {
    if (!single_cuts_) return false;
    for (size_t c = 0; c < cuts_.size(); ++c)
      if (totals_[c] != global_sizes[cuts_[c].dim]) return false;
    return true;
  }
  /// True when no cut has a second piece: this rank holds every element, and pieces are whole.
  bool is_alone() const { return alone_; }
  /// Index of the only cut on this dim, or -1.
  int cut_on(int dim) const;
  bool is_cut(int dim) const { return cut_on(dim) >= 0; }
  /// Mesh axes that some cut uses, ascending.
  const std::vector<int>& axes() const { return axes_; }

  /// Sizes of the piece at a coordinate for a tensor of these global sizes.
  std::vector<int64_t> local_sizes(const int64_t* global_sizes, int ndim) const;
  std::vector<int64_t> local_sizes_at(const int64_t* global_sizes, int ndim,
                                      const std::vector<int64_t>& coord) const;
  /// "Shard(dim=2, axes=[0], sizes=[3, 2])" for messages.
  std::string to_string() const;

 private:
  friend const Layout* intern_layout(const Mesh& mesh, std::vector<Cut> cuts);
  const Mesh* mesh_ = nullptr;
  std::vector<Cut> cuts_;
  std::vector<int> pieces_;
  std::vector<int64_t> offsets_;
  std::vector<int64_t> totals_;
  std::vector<int> axes_;
  bool single_cuts_ = true;
  bool alone_ = true;
};

/// The one Layout object for these cuts, or nullptr when there is no cut left (a plain tensor).
const Layout* intern_layout(const Mesh& mesh, std::vector<Cut> cuts);

/// `layout` with cuts on removed dims dropped and the others renumbered: new_dim[d] is the new
/// place of dim d, or -1 when it is gone (reduced, so that the tensor is replicated there).
const Layout* renumber(const Layout& layout, std::span<const int> new_dim);

}  // namespace shardfield::spec
