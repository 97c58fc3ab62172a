#include "shardfield/graph/hdf5/piece_file.h"

#include <cstring>
#include <limits>
#include <optional>
#include <stdexcept>
#include <thread>

#include "graph/mesh_files.h"

namespace shardfield::graph {
namespace {

namespace fs = std::filesystem;

class PieceFile : public FolderTest {
 protected:
  /// Replaces the one place of a number in a file: HDF5 stores them as they are in memory.
  template <class T>
  void exchange_number(const std::string& name, T old_number, T new_number) const {
    std::string bytes = text_of(name);
    std::string old_bytes(sizeof(T), '\0');
    std::memcpy(old_bytes.data(), &old_number, sizeof(T));
    const size_t at = bytes.find(old_bytes);
    ASSERT_NE(at, std::string::npos);
    ASSERT_EQ(bytes.find(old_bytes, at + 1), std::string::npos) << "the number is there twice";
    std::memcpy(bytes.data() + at, &new_number, sizeof(T));
    put(name, bytes);
  }
};

TEST_F(PieceFile, AMeshReadsBack) {
  EXPECT_TRUE(has_hdf5());
  for (const Mesh& mesh :
       {box_of_cubes(3, 2, 2), row_of_lines(4), mixed_surface(), mixed_volume()}) {
    const Fields points = fields_of_rows(mesh.num_points());
    const Fields cells = fields_of_rows(mesh.num_cells());
    write_hdf5(path("a.vtkhdf"), mesh, points, cells);
    EXPECT_EQ(num_hdf5_pieces(path("a.vtkhdf")), 1);
    const MeshFile back = read_hdf5(path("a.vtkhdf"));
    expect_same(back.mesh, mesh);
    expect_same(back.point_data, points);
    expect_same(back.cell_data, cells);
  }
}

void expect_piece(const MeshFile& file, const Mesh& mesh, const Piece& piece, const Fields& points,
                  const Fields& cells) {
  expect_same(file.point_data, point_fields_of(piece, points));
  expect_same(file.cell_data, cell_fields_of(piece, cells));
  EXPECT_TRUE(std::ranges::equal(file.mesh.blocks()[0].nodes.values, piece.nodes));
  for (size_t p = 0; p < piece.points.size(); ++p) {
    EXPECT_TRUE(
        std::ranges::equal(file.mesh.point(static_cast<int64_t>(p)), mesh.point(piece.points[p])));
  }
}

TEST_F(PieceFile, RanksReadTheirPiecesAtTheSameTime) {
  const Mesh mesh = box_of_cubes(6, 4, 3);
  const auto pieces = slabs_of(mesh);
  const Fields points = fields_of_rows(mesh.num_points());
  const Fields cells = fields_of_rows(mesh.num_cells());
  write_hdf5(path("a.vtkhdf"), mesh, pieces, points, cells);
  EXPECT_EQ(num_hdf5_pieces(path("a.vtkhdf")), 4);
  std::vector<std::optional<MeshFile>> files(3);
  std::vector<std::thread> ranks;
  for (size_t part = 0; part < 3; ++part) {
    ranks.emplace_back(
        [&, part] { files[part] = read_hdf5(path("a.vtkhdf"), static_cast<int64_t>(part)); });
  }
  for (std::thread& rank : ranks) rank.join();
  for (size_t part = 0; part < 3; ++part) {
    ASSERT_TRUE(files[part].has_value());
    expect_piece(*files[part], mesh, pieces[part], points, cells);
  }
  // Part 3 has no cells: refused as every empty mesh.
  expect_words<std::invalid_argument>([&] { (void)read_hdf5(path("a.vtkhdf"), 3); },
                                      {"piece 3", "it is empty"});
}

using Broken = std::runtime_error;
using Wrong = std::invalid_argument;

TEST_F(PieceFile, BrokenFilesAreRefusedWithTheCellsNumber) {
  // The last node of cell 998 and a coordinate stand in the file once each.
  std::vector<double> points;
  std::vector<int64_t> nodes;
  for (int64_t i = 0; i < 2000; ++i) points.insert(points.end(), {0.37 + i, 0, 0});
  for (int64_t i = 0; i < 1000; ++i) nodes.insert(nodes.end(), {2 * i, 2 * i + 1});
  const Mesh mesh(Array<double>::owning(points), 3,
                  {CellBlock::uniform(CellKind::line, Array<int64_t>::owning(nodes))});
  write_hdf5(path("a.vtkhdf"), mesh);
  exchange_number<int64_t>("a.vtkhdf", 1997, 987654321);
  expect_words<Wrong>([&] { (void)read_hdf5(path("a.vtkhdf")); },
                      {"read_hdf5: ", "a.vtkhdf", "piece 0",
                       "cell 998 (line) names point 987654321; expected 0 to 1999"});
  write_hdf5(path("a.vtkhdf"), mesh);
  exchange_number("a.vtkhdf", 1234.37, std::numeric_limits<double>::quiet_NaN());
  expect_words<Wrong>([&] { (void)read_hdf5(path("a.vtkhdf")); }, {"of point 1234 is NaN"});
}

TEST_F(PieceFile, TornFilesAndWrongCallsAreRefused) {
  const Mesh mesh = box_of_cubes(1, 1, 1);
  const std::string file = path("a.vtkhdf");
  expect_words<Broken>([&] { (void)read_hdf5(path("none.vtkhdf")); },
                       {"read_hdf5: ", "none.vtkhdf", "no such file"});
  put("text.vtkhdf", "no HDF5");
  expect_words<Broken>([&] { (void)num_hdf5_pieces(path("text.vtkhdf")); },
                       {"num_hdf5_pieces: ", "text.vtkhdf", "no HDF5 file"});
  write_hdf5(file, mesh);
  expect_words<Wrong>([&] { (void)read_hdf5(file, 1); }, {"expected a piece from 0 to 0, got 1"});
  expect_words<Wrong>([&] { (void)read_hdf5(file, -1); }, {"expected a piece from 0 to 0, got -1"});
  fs::resize_file(file, fs::file_size(file) / 2);
  expect_words<Broken>([&] { (void)read_hdf5(file); }, {"a.vtkhdf", "a torn one"});
  expect_words<Broken>([&] { write_hdf5(path("no/folder/a.vtkhdf"), mesh); }, {"make the file"});
  expect_words<Wrong>([&] { write_hdf5(file, mesh, {{"heat", at::zeros({3})}}); },
                      {"write_hdf5: point field \"heat\": expected 8 rows, got 3"});
  expect_words<Wrong>([&] { write_hdf5(file, mesh, std::span<const Piece>{}); },
                      {"at least one piece"});
}

}  // namespace
}  // namespace shardfield::graph
