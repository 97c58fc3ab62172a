#include <stdexcept>

#include <gtest/gtest.h>

#include "graph/meshes.h"

#include "shardfield/graph/vtk/mesh_files.h"

namespace shardfield::graph {
namespace {

/// What a build without VTK says, compiled and run in every build.
template <class Call>
void expect_named(const Call& call, const std::string& op) {
  try {
    call();
    FAIL() << op << " did not throw";
  } catch (const std::runtime_error& error) {
    const std::string words = error.what();
    EXPECT_EQ(words.rfind(op + ": \"", 0), 0U) << words;
    EXPECT_NE(words.find("needs VTK"), std::string::npos) << words;
    EXPECT_NE(words.find("libvtk9-dev"), std::string::npos) << words;
  }
}

TEST(WithoutVtk, EveryCallNamesIt) {
  EXPECT_FALSE(has_vtk());
  const Mesh mesh = row_of_lines(3);
  expect_named([] { (void)read_mesh("in.vtu"); }, "read_mesh");
  expect_named([&] { write_mesh("out.vtu", mesh); }, "write_mesh");
  expect_named([&] { (void)write_pieces("out.pvtu", mesh, {}); }, "write_pieces");
}

}  // namespace
}  // namespace shardfield::graph
