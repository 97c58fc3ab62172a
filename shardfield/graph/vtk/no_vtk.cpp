// The target shardfield::vtk where VTK was not found: every call says so.
#include <stdexcept>

#include "shardfield/graph/vtk/mesh_files.h"

namespace shardfield::graph {

namespace {

[[noreturn]] void fail(const char* op, const std::string& path) {
  throw std::runtime_error(
      std::string(op) + ": \"" + path +
      "\" needs VTK, which was not found when Shardfield was built; install VTK (Debian: "
      "libvtk9-dev) and build again, or write and read the file in Python");
}

}  // namespace

bool has_vtk() {
  return false;
}

MeshFile read_mesh(const std::string& path) {
  fail("read_mesh", path);
}

void write_mesh(const std::string& path, const Mesh& /*mesh*/, const Fields& /*point_data*/,
                const Fields& /*cell_data*/) {
  fail("write_mesh", path);
}

std::vector<std::string> write_pieces(const std::string& path, const Mesh& /*mesh*/,
                                      std::span<const Piece> /*pieces*/,
                                      const Fields& /*point_data*/, const Fields& /*cell_data*/) {
  fail("write_pieces", path);
}

}  // namespace shardfield::graph
