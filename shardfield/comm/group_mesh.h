#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardfield/spec/mesh.h"

namespace shardfield::comm {

/// One process group seen by the library. Holds the group weakly, so a group the user destroys is
/// gone and a later call is a clear error instead of a hang, and process exit stays clean.
class Comm {
 public:
  Comm() = default;
  /// @param registered_name  name in c10d's registry of groups, empty for groups outside it
  Comm(c10::intrusive_ptr<c10d::Backend> backend, std::string name,
       std::string registered_name = {});

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  /// The live group; throws when it has been destroyed.
  c10::intrusive_ptr<c10d::Backend> backend(const char* op) const;
  /// Tags of the next message to and from a rank. Counted per pair and direction, so that ranks
  /// with nothing to move in a call stay in step.
  int next_send_tag(int peer) const { return next(sent_, peer); }
  int next_recv_tag(int peer) const { return next(received_, peer); }

 private:
  int next(std::vector<uint32_t>& counts, int peer) const {
    counts.resize(static_cast<size_t>(size_));
    return static_cast<int>(counts[static_cast<size_t>(peer)]++ & 0xfffff);
  }

  c10::weak_intrusive_ptr<c10d::Backend> backend_{c10::intrusive_ptr<c10d::Backend>()};
  std::string name_;
  std::string registered_name_;
  int rank_ = 0;
  int size_ = 1;
  mutable std::vector<uint32_t> sent_, received_;
};

/// A mesh with its groups: one over all its ranks and one along each axis.
struct GroupMesh final : spec::Mesh {
  Comm whole;
  std::vector<Comm> axis;
};

inline const GroupMesh& groups_of(const spec::Mesh& mesh) {
  return static_cast<const GroupMesh&>(mesh);
}

/// One group of a mesh: its backend, and its name in c10d's registry (empty outside it) by which a
/// group the user destroyed is recognised.
struct Group {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::string registered_name = {};
};

/// Builds a mesh. Local.
/// @param shape        ranks per axis
/// @param axis_names   one name per axis; may be empty
/// @param mesh_rank    this rank's row-major number inside the mesh
/// @param whole        group over all ranks of the mesh, ranks in row-major order
/// @param axis         one group per axis through this rank, ranks in axis order
/// @throws c10::Error when group sizes and ranks do not match the shape.
const spec::Mesh* make_mesh(std::vector<int64_t> shape, std::vector<std::string> axis_names,
                            int mesh_rank, const Group& whole, const std::vector<Group>& axis);

/// One-axis mesh over a whole group. Local.
const spec::Mesh* make_mesh(const c10::intrusive_ptr<c10d::Backend>& group);

/// The part of a process group that serves a device.
Group group_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device);

}  // namespace shardfield::comm
