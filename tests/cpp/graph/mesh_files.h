// What the tests of mesh files share: a folder per test, meshes of mixed cells, fields of every
// type, and their comparison.
#pragma once

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "graph/meshes.h"
#include <unistd.h>

#include "shardfield/graph/fields.h"

namespace shardfield::graph {

/// A test with an empty folder of its own.
class FolderTest : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* test = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ =
        std::filesystem::temp_directory_path() / (std::string(test->test_suite_name()) + "_" +
                                                  test->name() + "_" + std::to_string(getpid()));
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directories(folder_);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }
  [[nodiscard]] std::string path(const std::string& name) const {
    return (folder_ / name).string();
  }
  void put(const std::string& name, const std::string& text) const {
    std::ofstream(path(name), std::ios::binary) << text;
  }
  [[nodiscard]] std::string text_of(const std::string& name) const {
    std::ifstream file(path(name), std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

 private:
  std::filesystem::path folder_;
};

inline Mesh mixed_mesh(std::vector<double> points, std::vector<uint8_t> kinds,
                       std::vector<int64_t> nodes, std::vector<int64_t> offsets) {
  return Mesh(Array<double>::owning(std::move(points)), 3,
              {CellBlock::mixed(Array<uint8_t>::owning(std::move(kinds)),
                                Array<int64_t>::owning(std::move(nodes)),
                                Array<int64_t>::owning(std::move(offsets)))});
}

/// A quad, two triangles and a pentagon.
inline Mesh mixed_surface() {
  return mixed_mesh(
      {0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0, 2, 0, 0, 2, 1.5, 0, 3, 0, 0, 2, 2, 0, 1, 2, 0.25},
      {9, 5, 5, 7}, {0, 1, 2, 3, 1, 4, 2, 4, 5, 2, 2, 5, 7, 8, 3}, {0, 4, 7, 10, 15});
}

/// A hexahedron with a pyramid on top, a wedge and a tetrahedron at its sides, and a line.
inline Mesh mixed_volume() {
  return mixed_mesh({0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0,   0,   0,   1, 1,  0,  1,
                     1, 1, 1, 0, 1, 1, 2, 0, 0, 2, 1, 0.1, 0.5, 0.5, 2, -1, -1, -1},
                    {14, 12, 3, 13, 10},
                    {4, 5, 6, 7, 10, 0, 1, 2, 3, 4, 5, 6, 7, 0, 11, 1, 8, 5, 2, 9, 6, 0, 1, 3, 11},
                    {0, 5, 13, 15, 21, 25});
}

inline void expect_same(const Mesh& got, const Mesh& want, double tolerance = 0) {
  ASSERT_EQ(got.num_points(), want.num_points());
  ASSERT_EQ(got.num_cells(), want.num_cells());
  for (int64_t p = 0; p < want.num_points(); ++p) {
    for (int d = 0; d < 3; ++d) {
      const double expected = d < want.dim() ? want.point(p)[static_cast<size_t>(d)] : 0;
      EXPECT_NEAR(got.point(p)[static_cast<size_t>(d)], expected, tolerance);
    }
  }
  for (int64_t c = 0; c < want.num_cells(); ++c) {
    EXPECT_EQ(got.kind_of(c), want.kind_of(c)) << "cell " << c;
    EXPECT_TRUE(std::ranges::equal(got.nodes_of(c), want.nodes_of(c))) << "cell " << c;
  }
}

/// Fields of every type and width, different in every row.
inline Fields fields_of_rows(int64_t rows) {
  const at::Tensor x = at::arange(rows * 3, at::kDouble).reshape({rows, 3});
  return {{"vector", x * 0.5},
          {"float", x.select(1, 0).to(at::kFloat)},
          {"long", x.select(1, 1).to(at::kLong) + (int64_t{1} << 40)},
          {"int", x.to(at::kInt)},
          {"short", x.select(1, 0).to(at::kShort)},
          {"char", -x.select(1, 0).to(at::kChar)},
          {"byte", x.select(1, 2).to(at::kByte)}};
}

inline void expect_same(const Fields& got, const Fields& want) {
  ASSERT_EQ(got.size(), want.size());
  for (const auto& [name, field] : want) {
    ASSERT_TRUE(got.contains(name)) << name;
    EXPECT_EQ(got.at(name).scalar_type(), field.scalar_type()) << name;
    EXPECT_TRUE(at::equal(got.at(name), field)) << name;
  }
}

/// Four parts of a box, cut by planes, with two ghost layers; the last part is empty.
inline std::vector<Piece> slabs_of(const Mesh& mesh) {
  std::vector<int32_t> labels;
  for (int64_t c = 0; c < mesh.num_cells(); ++c) {
    labels.push_back(static_cast<int32_t>(3 * c / mesh.num_cells()));
  }
  return cut_into_pieces(mesh, labels, 4, {Contact::point, 2, 0}, 1);
}

/// Expects `call` to throw exactly an Error whose message contains the words.
template <class Error, class Call>
void expect_words(const Call& call, const std::vector<std::string>& words) {
  try {
    call();
    FAIL() << "no error; expected: " << words.front();
  } catch (const Error& error) {
    for (const std::string& word : words) {
      EXPECT_NE(std::string(error.what()).find(word), std::string::npos)
          << "expected \"" << word << "\" in: " << error.what();
    }
  }
}

}  // namespace shardfield::graph
