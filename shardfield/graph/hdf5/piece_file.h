#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "shardfield/graph/fields.h"

/// Meshes and their pieces in one HDF5 file: the target shardfield::hdf5. It is there in every
/// build; where HDF5 was not found when Shardfield was built, every call but has_hdf5 throws and
/// says what to install. The layout is VTK's own (VTKHDF 1.0, unstructured grid), so ParaView and
/// pyvista open the file, and each rank reads its rows alone.
namespace shardfield::graph {

/// Whether this build reads and writes HDF5. Local.
[[nodiscard]] bool has_hdf5();

/// Writes a mesh as a file of one piece. Local.
///
/// @param path  by convention ends in .vtkhdf
/// @throws std::runtime_error without HDF5, or when it cannot write the file
/// @throws std::invalid_argument for fields whose rows are not one per point or cell
void write_hdf5(const std::string& path, const Mesh& mesh, const Fields& point_data = {},
                const Fields& cell_data = {});

/// Writes pieces with the arrays that write_pieces gives them. Local.
void write_hdf5(const std::string& path, const Mesh& mesh, std::span<const Piece> pieces,
                const Fields& point_data = {}, const Fields& cell_data = {});

/// How many pieces a file has. Local.
[[nodiscard]] int64_t num_hdf5_pieces(const std::string& path);

/// Reads one piece by its hyperslabs: no other rows are read. Local, so each rank may read its own.
///
/// @throws std::runtime_error without HDF5, for a file that is not VTKHDF, or is torn
/// @throws std::invalid_argument for a piece that is not there, or whose mesh is broken or empty
[[nodiscard]] MeshFile read_hdf5(const std::string& path, int64_t piece = 0);

}  // namespace shardfield::graph
