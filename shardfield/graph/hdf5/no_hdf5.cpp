// The target shardfield::hdf5 where HDF5 was not found: every call says so.
#include <stdexcept>

#include "shardfield/graph/hdf5/piece_file.h"

namespace shardfield::graph {

namespace {

[[noreturn]] void fail(const char* op, const std::string& path) {
  throw std::runtime_error(
      std::string(op) + ": \"" + path +
      "\" needs HDF5, which was not found when Shardfield was built; install HDF5 (Debian: "
      "libhdf5-dev) and build again, or write and read the file in Python");
}

}  // namespace

bool has_hdf5() {
  return false;
}

void write_hdf5(const std::string& path, const Mesh& /*mesh*/, const Fields& /*point_data*/,
                const Fields& /*cell_data*/) {
  fail("write_hdf5", path);
}

void write_hdf5(const std::string& path, const Mesh& /*mesh*/, std::span<const Piece> /*pieces*/,
                const Fields& /*point_data*/, const Fields& /*cell_data*/) {
  fail("write_hdf5", path);
}

int64_t num_hdf5_pieces(const std::string& path) {
  fail("num_hdf5_pieces", path);
}

MeshFile read_hdf5(const std::string& path, int64_t /*piece*/) {
  fail("read_hdf5", path);
}

}  // namespace shardfield::graph
