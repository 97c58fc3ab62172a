#include <stdexcept>

#include <gtest/gtest.h>

#include "graph/meshes.h"

#include "shardfield/graph/hdf5/piece_file.h"

namespace shardfield::graph {
namespace {

/// What a build without HDF5 says, compiled and run in every build.
template <class Call>
void expect_named(const Call& call, const std::string& op) {
  try {
    call();
    FAIL() << op << " did not throw";
  } catch (const std::runtime_error& error) {
    const std::string words = error.what();
    EXPECT_EQ(words.rfind(op + ": \"", 0), 0U) << words;
    EXPECT_NE(words.find("needs HDF5"), std::string::npos) << words;
    EXPECT_NE(words.find("libhdf5-dev"), std::string::npos) << words;
  }
}

TEST(WithoutHdf5, EveryCallNamesIt) {
  EXPECT_FALSE(has_hdf5());
  const Mesh mesh = row_of_lines(3);
  expect_named([&] { write_hdf5("a.vtkhdf", mesh); }, "write_hdf5");
  expect_named([&] { write_hdf5("a.vtkhdf", mesh, std::span<const Piece>{}); }, "write_hdf5");
  expect_named([] { (void)num_hdf5_pieces("a.vtkhdf"); }, "num_hdf5_pieces");
  expect_named([] { (void)read_hdf5("a.vtkhdf"); }, "read_hdf5");
}

}  // namespace
}  // namespace shardfield::graph
