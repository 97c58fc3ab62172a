#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "shardfield/spec/mesh.h"

namespace shardfield::comm {

/// One group to make a mesh of: its backend, and its name in c10d's registry (empty outside it).
struct Group {
  c10::intrusive_ptr<c10d::Backend> backend;
  std::string registered_name = {};
  c10::DeviceType device = c10::DeviceType::CPU;
};

/// One process group seen by the library. A group of c10d's registry is looked up there at each
/// call, so that one the user destroys is gone (threads, connections) and a later call is a clear
/// error instead of a hang. Other groups are held until release_groups(). No weak pointers: they
/// would keep a destroyed group's connections open.
class Comm {
 public:
  Comm() = default;
  Comm(const Group& group, std::string name);

  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }
  /// The live group; throws when it has been destroyed.
  c10::intrusive_ptr<c10d::Backend> backend(const char* op) const;
  /// Lets go of a group outside of c10d's registry.
  void release() const { held_.reset(); }
  /// Tags of the next message to and from a rank. Counted per pair and direction, so that ranks
  /// with nothing to move in a call stay in step.
  int next_send_tag(int peer) const { return next(sent_, peer); }
  int next_recv_tag(int peer) const { return next(received_, peer); }

 private:
  int next(std::vector<uint32_t>& counts, int peer) const {
    counts.resize(static_cast<size_t>(size_));
    return static_cast<int>(counts[static_cast<size_t>(peer)]++ & 0xfffff);
  }
  c10::intrusive_ptr<c10d::Backend> from_registry() const;

  mutable c10::intrusive_ptr<c10d::Backend> held_;
  const c10d::Backend* address_ = nullptr;
  std::string name_;
  std::string registered_name_;
  c10::DeviceType device_ = c10::DeviceType::CPU;
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

/// Builds a mesh. Local.
/// @param shape        ranks per axis
/// @param axis_names   one name per axis; may be empty
/// @param mesh_rank    this rank's row-major number inside the mesh
/// @param whole        group over all ranks of the mesh, ranks in row-major order
/// @param axis         one group per axis through this rank, ranks in axis order
/// @throws c10::Error when group sizes and ranks do not match the shape.
const spec::Mesh* make_mesh(std::vector<int64_t> shape, std::vector<std::string> axis_names,
                            int mesh_rank, const Group& whole, const std::vector<Group>& axis);

/// Lets go of a mesh's groups that are outside of c10d's registry: their connections close when
/// nobody else holds them, so that peers in a transfer fail at once. Later calls on the mesh are
/// errors. Local.
void release_groups(const spec::Mesh& mesh);

/// One-axis mesh over a whole group. Local.
const spec::Mesh* make_mesh(const c10::intrusive_ptr<c10d::Backend>& group);

/// The part of a process group that serves a device.
Group group_of(const c10::intrusive_ptr<c10d::ProcessGroup>& group, c10::DeviceType device);

}  // namespace shardfield::comm
