#include "shardfield/graph/fields.h"

#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/ATen.h>

namespace shardfield::graph {

namespace {

bool in_mesh_files(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kFloat:
    case at::kLong:
    case at::kInt:
    case at::kShort:
    case at::kChar:
    case at::kByte:
    case at::kBool:
      return true;
    default:
      return false;
  }
}

void check_field(const std::string& where, const at::Tensor& field, int64_t rows) {
  if (field.dim() == 0 || field.size(0) != rows) {
    throw std::invalid_argument(where + ": expected " + std::to_string(rows) + " rows, got " +
                                (field.dim() == 0 ? "a number" : std::to_string(field.size(0))));
  }
  if (field.dim() > 2) {
    throw std::invalid_argument(where + ": expected one or two dims, got " +
                                std::to_string(field.dim()) + "; flatten the rows first");
  }
  if (!in_mesh_files(field.scalar_type())) {
    throw std::invalid_argument(where + ": mesh files lack the type " +
                                std::string(c10::toString(field.scalar_type())) +
                                "; convert it first");
  }
}

Fields rows_of(const Fields& fields, const std::vector<int64_t>& numbers,
               const std::vector<int32_t>& owners, int64_t part) {
  const at::Tensor index = at::tensor(numbers, at::kLong);
  Fields out;
  for (const auto& [name, field] : fields) {
    out.emplace(name, field.detach().cpu().index_select(0, index));
  }
  const at::Tensor owner = at::tensor(owners, at::kInt);
  out["owner"] = owner;
  out["global_id"] = index;
  out["vtkGhostType"] = owner.ne(part).to(at::kByte);
  return out;
}

}  // namespace

CellLists cell_lists_of(const Mesh& mesh) {
  CellLists lists;
  mesh.for_each_cell(0, mesh.num_cells(), [&](int64_t, CellKind kind, auto nodes) {
    lists.kinds.push_back(static_cast<uint8_t>(kind));
    lists.nodes.insert(lists.nodes.end(), nodes.begin(), nodes.end());
    lists.offsets.push_back(static_cast<int64_t>(lists.nodes.size()));
  });
  return lists;
}

void check_fields(const char* op, const Mesh& mesh, const Fields& point_data,
                  const Fields& cell_data) {
  for (const auto& [name, field] : point_data) {
    check_field(std::string(op) + ": point field \"" + name + "\"", field, mesh.num_points());
  }
  for (const auto& [name, field] : cell_data) {
    check_field(std::string(op) + ": cell field \"" + name + "\"", field, mesh.num_cells());
  }
}

Fields point_fields_of(const Piece& piece, const Fields& point_data) {
  return rows_of(point_data, piece.points, piece.point_owners, piece.part);
}

Fields cell_fields_of(const Piece& piece, const Fields& cell_data) {
  Fields out = rows_of(cell_data, piece.cells, piece.cell_owners, piece.part);
  out["ghost_layer"] = at::tensor(piece.cell_layers, at::kInt);
  return out;
}

}  // namespace shardfield::graph
