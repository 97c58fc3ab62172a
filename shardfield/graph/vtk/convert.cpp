#include "shardfield/graph/vtk/convert.h"

#include <algorithm>
#include <iterator>
#include <memory>
#include <optional>
#include <stdexcept>

#include <ATen/ATen.h>

#include <vtkCellArray.h>
#include <vtkCellData.h>
#include <vtkDoubleArray.h>
#include <vtkPointData.h>
#include <vtkPoints.h>
#include <vtkTypeInt64Array.h>
#include <vtkUnsignedCharArray.h>

namespace shardfield::graph {

namespace {

static_assert(sizeof(vtkTypeInt64) == sizeof(int64_t));

constexpr int kDims = 3;  // VTK's points always have three coordinates
constexpr const char* kGlobalId = "global_id";

/// The elements of a VTK array, which stays alive with them.
template <class T, class VtkArray>
Array<T> borrow(vtkSmartPointer<VtkArray> array) {
  const auto* first = reinterpret_cast<const T*>(array->GetPointer(0));
  const std::span<const T> view(first, static_cast<size_t>(array->GetNumberOfValues()));
  return Array<T>(view, std::make_shared<vtkSmartPointer<VtkArray>>(std::move(array)));
}

Array<double> points_of(vtkPointSet& set) {
  vtkDataArray* data = set.GetPoints() == nullptr ? nullptr : set.GetPoints()->GetData();
  if (data == nullptr) return {};
  auto doubles = vtkSmartPointer<vtkDoubleArray>(vtkDoubleArray::FastDownCast(data));
  if (doubles == nullptr) {
    doubles = vtkSmartPointer<vtkDoubleArray>::New();
    doubles->DeepCopy(data);
  }
  return borrow<double>(std::move(doubles));
}

CellBlock block_of(vtkCellArray& cells, Array<uint8_t> kinds) {
  if (!cells.IsStorage64Bit()) cells.ConvertTo64BitStorage();
  const vtkSmartPointer<vtkTypeInt64Array> nodes = cells.GetConnectivityArray64();
  const vtkSmartPointer<vtkTypeInt64Array> offsets = cells.GetOffsetsArray64();
  return CellBlock::mixed(std::move(kinds), borrow<int64_t>(nodes), borrow<int64_t>(offsets));
}

/// Kinds of a surface's cells, which VTK tells by the list that they stand in and their sizes.
Array<uint8_t> kinds_of(vtkCellArray& cells, CellKind one_size, int64_t size, CellKind other) {
  std::vector<uint8_t> kinds(static_cast<size_t>(cells.GetNumberOfCells()));
  for (size_t i = 0; i < kinds.size(); ++i) {
    const int64_t nodes = cells.GetCellSize(static_cast<vtkIdType>(i));
    CellKind kind = nodes == size ? one_size : other;
    if (other == CellKind::polygon && nodes == 4) kind = CellKind::quad;
    kinds[i] = static_cast<uint8_t>(kind);
  }
  return Array<uint8_t>::owning(std::move(kinds));
}

std::vector<CellBlock> blocks_of(vtkPointSet& set) {
  std::vector<CellBlock> blocks;
  if (auto* grid = vtkUnstructuredGrid::SafeDownCast(&set)) {
    if (grid->GetNumberOfCells() == 0) return blocks;
    const vtkSmartPointer<vtkUnsignedCharArray> kinds = grid->GetCellTypesArray();
    blocks.push_back(block_of(*grid->GetCells(), borrow<uint8_t>(kinds)));
  } else if (auto* surface = vtkPolyData::SafeDownCast(&set)) {
    const auto add = [&](vtkCellArray* cells, CellKind one_size, int64_t size, CellKind other) {
      if (cells == nullptr || cells->GetNumberOfCells() == 0) return;
      blocks.push_back(block_of(*cells, kinds_of(*cells, one_size, size, other)));
    };
    // The order in which VTK numbers them.
    add(surface->GetVerts(), CellKind::vertex, 1, CellKind::poly_vertex);
    add(surface->GetLines(), CellKind::line, 2, CellKind::poly_line);
    add(surface->GetPolys(), CellKind::triangle, 3, CellKind::polygon);
    add(surface->GetStrips(), CellKind::triangle_strip, 3, CellKind::triangle_strip);
  }
  return blocks;
}

/// A torch type with VTK's values, and the VTK type whose memory it can show.
struct ElementType {
  at::ScalarType torch;
  int vtk;
};

std::optional<ElementType> element_type(int vtk_type) {
  switch (vtk_type) {
    case VTK_DOUBLE:
      return ElementType{at::kDouble, VTK_DOUBLE};
    case VTK_FLOAT:
      return ElementType{at::kFloat, VTK_FLOAT};
    case VTK_SHORT:
      return ElementType{at::kShort, VTK_SHORT};
    case VTK_INT:
    case VTK_UNSIGNED_SHORT:
      return ElementType{at::kInt, VTK_INT};
    case VTK_CHAR:
    case VTK_SIGNED_CHAR:
      return ElementType{at::kChar, vtk_type};
    case VTK_UNSIGNED_CHAR:
      return ElementType{at::kByte, VTK_UNSIGNED_CHAR};
    case VTK_LONG_LONG:
      return ElementType{at::kLong, vtk_type};
    case VTK_LONG:
      return ElementType{at::kLong, sizeof(long) == sizeof(int64_t) ? VTK_LONG : VTK_LONG_LONG};
    case VTK_ID_TYPE:
      return ElementType{at::kLong,
                         sizeof(vtkIdType) == sizeof(int64_t) ? VTK_ID_TYPE : VTK_LONG_LONG};
    case VTK_UNSIGNED_INT:
    case VTK_UNSIGNED_LONG:
    case VTK_UNSIGNED_LONG_LONG:
      return ElementType{at::kLong, VTK_LONG_LONG};
    default:
      return std::nullopt;
  }
}

std::optional<at::Tensor> tensor_of(vtkDataArray* array) {
  const auto type = element_type(array->GetDataType());
  if (!type) return std::nullopt;
  vtkSmartPointer<vtkDataArray> kept = array;
  if (!array->HasStandardMemoryLayout() || array->GetDataType() != type->vtk) {
    kept = vtkSmartPointer<vtkDataArray>::Take(vtkDataArray::CreateDataArray(type->vtk));
    kept->DeepCopy(array);
  }
  std::vector<int64_t> shape{static_cast<int64_t>(kept->GetNumberOfTuples())};
  if (kept->GetNumberOfComponents() != 1) shape.push_back(kept->GetNumberOfComponents());
  void* memory = kept->GetVoidPointer(0);
  return at::from_blob(
      memory, shape, [kept](void*) mutable { kept = nullptr; }, at::TensorOptions(type->torch));
}

/// Numerical arrays by name.
Fields fields_of(vtkDataSetAttributes* attributes) {
  Fields fields;
  for (int i = 0; i < attributes->GetNumberOfArrays(); ++i) {
    vtkDataArray* array = attributes->GetArray(i);
    if (array == nullptr || array->GetName() == nullptr) continue;
    if (auto tensor = tensor_of(array)) fields.emplace(array->GetName(), std::move(*tensor));
  }
  return fields;
}

/// Rows of both one after the other; fields that only one has are left out.
void append(Fields& all, const Fields& more) {
  for (auto it = all.begin(); it != all.end();) {
    const auto other = more.find(it->first);
    const bool fits = other != more.end() && other->second.dtype() == it->second.dtype() &&
                      other->second.sizes().slice(1) == it->second.sizes().slice(1);
    if (!fits) {
      it = all.erase(it);
      continue;
    }
    it->second = at::cat({it->second, other->second});
    ++it;
  }
}

int vtk_type_of(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
      return VTK_DOUBLE;
    case at::kFloat:
      return VTK_FLOAT;
    case at::kLong:
      return VTK_LONG_LONG;
    case at::kInt:
      return VTK_INT;
    case at::kShort:
      return VTK_SHORT;
    case at::kChar:
      return VTK_SIGNED_CHAR;
    default:  // bytes and truth values: check_fields let no others through
      return VTK_UNSIGNED_CHAR;
  }
}

void add_field(vtkDataSetAttributes* attributes, const std::string& name, const at::Tensor& field,
               std::vector<at::Tensor>& kept) {
  const at::Tensor& rows = kept.emplace_back(field.detach().cpu().contiguous());
  int type = vtk_type_of(rows.scalar_type());
  // VTK takes global numbers from arrays of its own type alone.
  if (name == kGlobalId && sizeof(vtkIdType) == sizeof(int64_t)) type = VTK_ID_TYPE;
  auto array = vtkSmartPointer<vtkDataArray>::Take(vtkDataArray::CreateDataArray(type));
  array->SetName(name.c_str());
  array->SetNumberOfComponents(rows.dim() > 1 ? static_cast<int>(rows.size(1)) : 1);
  array->SetVoidArray(rows.data_ptr(), rows.numel(), 1);
  attributes->AddArray(array);
}

template <class VtkArray, class T>
vtkSmartPointer<VtkArray> lend(std::span<const T> values) {
  auto array = vtkSmartPointer<VtkArray>::New();
  using Element = typename VtkArray::ValueType;
  // VTK does not write to arrays that its writers read.
  array->SetArray(reinterpret_cast<Element*>(const_cast<T*>(values.data())),
                  static_cast<vtkIdType>(values.size()), 1);
  return array;
}

template <class VtkArray, class T>
vtkSmartPointer<VtkArray> copied(const std::vector<T>& values) {
  auto array = vtkSmartPointer<VtkArray>::New();
  array->SetNumberOfValues(static_cast<vtkIdType>(values.size()));
  std::copy(values.begin(), values.end(), array->GetPointer(0));
  return array;
}

vtkSmartPointer<vtkPoints> points_from(const vtkSmartPointer<vtkDoubleArray>& coordinates) {
  coordinates->SetNumberOfComponents(kDims);
  auto points = vtkSmartPointer<vtkPoints>::New();
  points->SetData(coordinates);
  return points;
}

/// The points of some numbers, or all; coordinates that the mesh lacks are 0.
vtkSmartPointer<vtkPoints> points_from(const Mesh& mesh, const std::vector<int64_t>* numbers) {
  if (numbers == nullptr && mesh.dim() == kDims) {
    return points_from(lend<vtkDoubleArray>(mesh.points().values));
  }
  const auto count = numbers == nullptr ? mesh.num_points() : static_cast<int64_t>(numbers->size());
  std::vector<double> flat(static_cast<size_t>(count * kDims), 0.0);
  for (int64_t i = 0; i < count; ++i) {
    const auto point = mesh.point(numbers == nullptr ? i : (*numbers)[static_cast<size_t>(i)]);
    std::copy(point.begin(), point.end(), flat.begin() + i * kDims);
  }
  return points_from(copied<vtkDoubleArray>(flat));
}

/// Cells as VTK takes them.
struct Cells {
  vtkSmartPointer<vtkUnsignedCharArray> kinds;
  vtkSmartPointer<vtkCellArray> lists = vtkSmartPointer<vtkCellArray>::New();
};

Cells cells_from(const Mesh& mesh) {
  Cells out;
  const CellBlock& first = mesh.blocks().front();
  if (mesh.blocks().size() == 1 && !first.offsets.empty() && !first.kinds.empty()) {
    out.kinds = lend<vtkUnsignedCharArray>(first.kinds.values);
    out.lists->SetData(lend<vtkTypeInt64Array>(first.offsets.values),
                       lend<vtkTypeInt64Array>(first.nodes.values));
    return out;
  }
  const CellLists all = cell_lists_of(mesh);
  out.kinds = copied<vtkUnsignedCharArray>(all.kinds);
  out.lists->SetData(copied<vtkTypeInt64Array>(all.offsets), copied<vtkTypeInt64Array>(all.nodes));
  return out;
}

void add_fields(vtkDataSetAttributes* attributes, const Fields& fields,
                std::vector<at::Tensor>& kept) {
  for (const auto& [name, field] : fields) add_field(attributes, name, field, kept);
}

}  // namespace

MeshFile from_point_sets(const PointSets& sets) {
  std::vector<CellBlock> blocks;
  Fields cell_data;
  for (const auto& set : sets) {
    std::vector<CellBlock> more = blocks_of(*set);
    if (more.empty()) continue;
    const Fields fields = fields_of(set->GetCellData());
    if (blocks.empty()) {
      cell_data = fields;
    } else {
      append(cell_data, fields);
    }
    std::move(more.begin(), more.end(), std::back_inserter(blocks));
  }
  if (sets.empty()) return {Mesh({}, kDims, {}), {}, {}};  // throws: an empty mesh
  Fields point_data = fields_of(sets.front()->GetPointData());
  return {Mesh(points_of(*sets.front()), kDims, std::move(blocks)), std::move(point_data),
          std::move(cell_data)};
}

Lent<vtkUnstructuredGrid> to_grid(const Mesh& mesh, const Fields& point_data,
                                  const Fields& cell_data) {
  Lent<vtkUnstructuredGrid> out;
  const Cells cells = cells_from(mesh);
  out.data->SetPoints(points_from(mesh, nullptr));
  out.data->SetCells(cells.kinds, cells.lists);
  add_fields(out.data->GetPointData(), point_data, out.kept);
  add_fields(out.data->GetCellData(), cell_data, out.kept);
  return out;
}

Lent<vtkUnstructuredGrid> to_grid(const Mesh& mesh, const Piece& piece, const Fields& point_data,
                                  const Fields& cell_data) {
  Lent<vtkUnstructuredGrid> out;
  out.data->SetPoints(points_from(mesh, &piece.points));
  const auto lists = vtkSmartPointer<vtkCellArray>::New();
  lists->SetData(copied<vtkTypeInt64Array>(piece.offsets), copied<vtkTypeInt64Array>(piece.nodes));
  out.data->SetCells(copied<vtkUnsignedCharArray>(piece.kinds), lists);
  add_fields(out.data->GetPointData(), point_fields_of(piece, point_data), out.kept);
  add_fields(out.data->GetCellData(), cell_fields_of(piece, cell_data), out.kept);
  out.data->GetPointData()->SetActiveGlobalIds(kGlobalId);
  out.data->GetCellData()->SetActiveGlobalIds(kGlobalId);
  return out;
}

Lent<vtkPolyData> to_surface(const Mesh& mesh, bool any_polygon, const std::string& format) {
  mesh.for_each_cell(0, mesh.num_cells(), [&](int64_t cell, CellKind kind, auto) {
    const bool fits = kind == CellKind::triangle ||
                      (any_polygon && (kind == CellKind::quad || kind == CellKind::polygon));
    if (!fits) {
      throw std::invalid_argument("write_mesh: " + format + " files hold " +
                                  (any_polygon ? "triangles, quads and polygons" : "triangles") +
                                  ", got cell " + std::to_string(cell) + " (" +
                                  shape_of(kind).name + "); write a .vtu file");
    }
  });
  Lent<vtkPolyData> out;
  out.data->SetPoints(points_from(mesh, nullptr));
  out.data->SetPolys(cells_from(mesh).lists);
  return out;
}

}  // namespace shardfield::graph
