// What a C++ user writes who keeps meshes in files: with the libraries a square goes through both
// kinds of files, without them every call says what is missing.
#include <cstdio>
#include <exception>
#include <filesystem>
#include <string>

#include <ATen/ATen.h>

#include <shardfield/graph/hdf5/piece_file.h>
#include <shardfield/graph/vtk/mesh_files.h>

namespace graph = shardfield::graph;

namespace {

/// Whether the heat that `write` puts into a file comes back from `read`.
template <class Write, class Read>
bool comes_back(const Write& write, const Read& read, const at::Tensor& heat) {
  write();
  const graph::MeshFile file = read();
  return file.mesh.num_cells() == 2 && at::equal(file.point_data.at("heat"), heat);
}

template <class Call>
bool names(const Call& call, const std::string& library) {
  try {
    call();
  } catch (const std::exception& error) {
    return std::string(error.what()).find("needs " + library) != std::string::npos;
  }
  return false;
}

}  // namespace

int main() {
  const graph::Mesh mesh(
      graph::Array<double>::owning({0, 0, 1, 0, 1, 1, 0, 1}), 2,
      {graph::CellBlock::uniform(graph::CellKind::triangle,
                                 graph::Array<int64_t>::owning({0, 1, 2, 0, 2, 3}))});
  const at::Tensor heat = at::arange(4, at::kDouble);
  // Run in its build folder; another run elsewhere has its own.
  const std::string stem = (std::filesystem::current_path() / "square").string();
  const auto write_vtk = [&] { graph::write_mesh(stem + ".vtu", mesh, {{"heat", heat}}); };
  const auto read_vtk = [&] { return graph::read_mesh(stem + ".vtu"); };
  const auto write_hdf5 = [&] { graph::write_hdf5(stem + ".vtkhdf", mesh, {{"heat", heat}}); };
  const auto read_hdf5 = [&] { return graph::read_hdf5(stem + ".vtkhdf"); };
  const bool vtk = EXPECT_VTK ? comes_back(write_vtk, read_vtk, heat) : names(read_vtk, "VTK");
  const bool hdf5 =
      EXPECT_HDF5 ? comes_back(write_hdf5, read_hdf5, heat) : names(read_hdf5, "HDF5");
  const bool passed =
      vtk && hdf5 && graph::has_vtk() == EXPECT_VTK && graph::has_hdf5() == EXPECT_HDF5;
  std::printf("mesh files: %s\n", passed ? "passed" : "failed");
  return passed ? 0 : 1;
}
