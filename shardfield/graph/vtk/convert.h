// Between VTK's objects and Shardfield's. Not installed; only files of this folder include it.
#pragma once

#include <string>
#include <vector>

#include <vtkPointSet.h>
#include <vtkPolyData.h>
#include <vtkSmartPointer.h>
#include <vtkUnstructuredGrid.h>

#include "shardfield/graph/vtk/mesh_files.h"

namespace shardfield::graph {

using PointSets = std::vector<vtkSmartPointer<vtkPointSet>>;

/// The cells of unstructured grids and surfaces over the points of the first (one data set, or the
/// blocks of an Exodus file, which share their points), with the fields that all have. Memory of
/// the right type stays VTK's.
[[nodiscard]] MeshFile from_point_sets(const PointSets& sets);

/// A VTK object over memory of a mesh and of tensors, which must outlive it.
template <class Data>
struct Lent {
  vtkSmartPointer<Data> data = vtkSmartPointer<Data>::New();
  std::vector<at::Tensor> kept;  ///< Contiguous forms of the fields.
};

/// A whole mesh as a grid. Arrays are handed over where the mesh holds one block with offsets.
[[nodiscard]] Lent<vtkUnstructuredGrid> to_grid(const Mesh& mesh, const Fields& point_data,
                                                const Fields& cell_data);

/// A surface of triangles, or with `any_polygon` of quads and polygons too.
/// @throws std::invalid_argument for other cells, naming the first and the format.
[[nodiscard]] Lent<vtkPolyData> to_surface(const Mesh& mesh, bool any_polygon,
                                           const std::string& format);

/// A piece with the rows of the fields that it holds, and its owner, global_id and ghost arrays.
[[nodiscard]] Lent<vtkUnstructuredGrid> to_grid(const Mesh& mesh, const Piece& piece,
                                                const Fields& point_data, const Fields& cell_data);

}  // namespace shardfield::graph
