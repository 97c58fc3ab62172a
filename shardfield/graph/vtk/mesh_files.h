#pragma once

#include <span>
#include <string>
#include <vector>

#include "shardfield/graph/fields.h"

/// Mesh files in C++: the target shardfield::vtk. It is there in every build; where VTK was not
/// found when Shardfield was built, every call but has_vtk throws and says what to install.
namespace shardfield::graph {

/// Whether this build reads and writes mesh files. Local.
[[nodiscard]] bool has_vtk();

/// Reads a mesh with VTK's readers. Local. Points, connectivity and fields stay in VTK's memory
/// where it holds them in the mesh's types (float64 points, int64 nodes); the mesh and the tensors
/// keep it alive. Fields that are no numbers are left out, unsigned numbers become the next wider
/// signed type. Calls from several threads run one after the other.
///
/// @param path  .vtu, .pvtu (all pieces as one mesh with their ghosts), .vtk (legacy), .vtp, .stl,
///   .ply, .obj, and Exodus: .e, .ex2, .exo (the last time step, cells block by block, fields that
///   all blocks have)
/// @throws std::runtime_error without VTK, when there is no such file, or when VTK cannot read it
///   (with VTK's words); torn files among them. Text may be cut so that nothing shows: a .obj, or a
///   .vtk behind its cells, that ends between two lines is a smaller mesh, or has fewer fields.
/// @throws std::invalid_argument for an unknown ending, or a file whose mesh is broken or empty;
///   the message names the file and the cell or point.
[[nodiscard]] MeshFile read_mesh(const std::string& path);

/// Writes a mesh with VTK's writers. Local. Arrays are handed over without a copy where VTK holds
/// them in the same form: tensors that are contiguous on the CPU, points with three coordinates, a
/// mesh of one block with kinds and offsets. Truth values become uint8.
///
/// @param path  .vtu, .vtk (legacy, binary), Exodus (.e, .ex2, .exo: float64 fields, cells block by
///   block), and without fields and in float32 .stl for surfaces of triangles, .ply and .obj for
///   those of any polygons
/// @throws std::runtime_error without VTK, or when VTK cannot write the file
/// @throws std::invalid_argument for an unknown ending, fields as check_fields refuses them, cells
///   or fields that the format lacks; names the field or cell.
void write_mesh(const std::string& path, const Mesh& mesh, const Fields& point_data = {},
                const Fields& cell_data = {});

/// Writes the pieces of a mesh as one .vtu file each and a .pvtu index. Local. Points and cells
/// carry "owner", "global_id" (marked as VTK's global ids) and "vtkGhostType", cells "ghost_layer"
/// too, so that ParaView hides ghosts. Pieces without cells have no file. One piece is in memory
/// at a time.
///
/// @param path        ends in .pvtu
/// @param mesh        the whole mesh that the pieces were cut from
/// @param pieces      as cut_into_pieces returned them
/// @param point_data  fields of the whole mesh
/// @param cell_data   fields of the whole mesh
/// @return the files, the index first
/// @throws as write_mesh.
std::vector<std::string> write_pieces(const std::string& path, const Mesh& mesh,
                                      std::span<const Piece> pieces, const Fields& point_data = {},
                                      const Fields& cell_data = {});

}  // namespace shardfield::graph
