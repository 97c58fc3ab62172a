#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "shardfield/graph/mesh.h"
#include "shardfield/graph/pieces.h"

namespace shardfield::graph {

/// Fields by name: one row per point or cell in front, (num_rows) or (num_rows, width).
using Fields = std::map<std::string, at::Tensor>;

/// A mesh with the fields of its file.
struct MeshFile {
  Mesh mesh;
  Fields point_data;
  Fields cell_data;
};

/// The cells of all blocks in one list, as mesh files hold them: cell i has the nodes
/// nodes[offsets[i]] .. nodes[offsets[i + 1] - 1].
struct CellLists {
  std::vector<uint8_t> kinds;  ///< CellKind of each cell
  std::vector<int64_t> offsets{0};
  std::vector<int64_t> nodes;
};

/// Local.
[[nodiscard]] CellLists cell_lists_of(const Mesh& mesh);

/// Local.
///
/// @param op  begins the message
/// @throws std::invalid_argument unless every field has one row per point or cell of the mesh, one
///   or two dims, and numbers that mesh files hold (float64, float32, int64, int32, int16, int8,
///   uint8, bool); the message names the field.
void check_fields(const char* op, const Mesh& mesh, const Fields& point_data,
                  const Fields& cell_data);

/// Rows of a mesh's point fields that a piece holds, with "owner" (int32), "global_id" (int64) and
/// "vtkGhostType" (uint8, 1 for points of other parts) in place of fields of these names. Local, on
/// the CPU, detached.
[[nodiscard]] Fields point_fields_of(const Piece& piece, const Fields& point_data);

/// The same for cell fields, with "ghost_layer" (int32, 0 for own cells) too.
[[nodiscard]] Fields cell_fields_of(const Piece& piece, const Fields& cell_data);

}  // namespace shardfield::graph
