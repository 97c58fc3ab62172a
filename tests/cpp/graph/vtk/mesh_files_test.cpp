#include "shardfield/graph/vtk/mesh_files.h"

#include <iterator>
#include <map>
#include <sstream>
#include <stdexcept>

#include "graph/mesh_files.h"

namespace shardfield::graph {
namespace {

namespace fs = std::filesystem;

class MeshFiles : public FolderTest {};

/// The text of a .vtu file: points, node numbers, where the lists end, and kinds.
std::string grid_text(const std::string& points, const std::string& nodes, const std::string& ends,
                      const std::string& kinds) {
  const auto count = [](const std::string& numbers) {
    std::istringstream in(numbers);
    return std::distance(std::istream_iterator<std::string>(in), {});
  };
  const auto array = [](const std::string& name, const std::string& type,
                        const std::string& values) {
    return "<DataArray type=\"" + type + "\" " + name + " format=\"ascii\">" + values +
           "</DataArray>";
  };
  return "<VTKFile type=\"UnstructuredGrid\" version=\"1.0\" header_type=\"UInt64\">"
         "<UnstructuredGrid><Piece NumberOfPoints=\"" +
         std::to_string(count(points) / 3) + "\" NumberOfCells=\"" + std::to_string(count(kinds)) +
         "\"><Points>" + array("NumberOfComponents=\"3\"", "Float64", points) + "</Points><Cells>" +
         array("Name=\"connectivity\"", "Int64", nodes) + array("Name=\"offsets\"", "Int64", ends) +
         array("Name=\"types\"", "UInt8", kinds) + "</Cells></Piece></UnstructuredGrid></VTKFile>";
}

const std::string kLegacy = "# vtk DataFile Version 3.0\nx\nASCII\nDATASET ";
const std::string kSquare = "0 0 0 1 0 0 1 1 0 0 1 0";

TEST_F(MeshFiles, MeshesAndFieldsReadBack) {
  EXPECT_TRUE(has_vtk());
  for (const Mesh& mesh : {box_of_cubes(3, 2, 2), box_of_tetrahedra(2, 1, 1), mixed_surface(),
                           mixed_volume(), row_of_lines(4)}) {
    for (const std::string name : {"a.vtu", "a.vtk"}) {
      const Fields points = fields_of_rows(mesh.num_points());
      const Fields cells = fields_of_rows(mesh.num_cells());
      write_mesh(path(name), mesh, points, cells);
      const MeshFile back = read_mesh(path(name));
      expect_same(back.mesh, mesh);
      expect_same(back.point_data, points);
      expect_same(back.cell_data, cells);
    }
  }
}

TEST_F(MeshFiles, FieldsMayBeViewsAndNeedGradients) {
  const Mesh mesh = box_of_cubes(1, 1, 1);
  const at::Tensor wide = at::arange(32, at::kDouble).reshape({4, 8}).requires_grad_();
  write_mesh(path("a.vtu"), mesh, {{"turned", wide.t()}, {"truth", at::ones({8}, at::kBool)}});
  const MeshFile back = read_mesh(path("a.vtu"));
  EXPECT_TRUE(at::equal(back.point_data.at("turned"), wide.detach().t()));
  EXPECT_TRUE(at::equal(back.point_data.at("truth"), at::ones({8}, at::kByte)));
}

TEST_F(MeshFiles, ReadArraysOutliveTheReader) {
  write_mesh(path("a.vtu"), mixed_surface(), {{"heat", at::arange(9, at::kDouble)}});
  at::Tensor heat;
  {
    const MeshFile file = read_mesh(path("a.vtu"));
    heat = file.point_data.at("heat");
  }
  heat.add_(1);
  EXPECT_TRUE(at::equal(heat, at::arange(1, 10, at::kDouble)));
}

TEST_F(MeshFiles, SurfacesGoThroughTheirFormats) {
  const Mesh surface = mixed_surface();
  for (const std::string name : {"a.ply", "a.obj"}) {
    write_mesh(path(name), surface);
    expect_same(read_mesh(path(name)).mesh, surface, 1e-6);
  }
  const Mesh triangles(
      Array<double>(surface.points().values.first(12)), 3,
      {CellBlock::uniform(CellKind::triangle, Array<int64_t>::owning({0, 1, 2, 0, 2, 3}))});
  write_mesh(path("a.stl"), triangles);
  expect_same(read_mesh(path("a.stl")).mesh, triangles, 1e-6);
}

TEST_F(MeshFiles, SurfacesKeepVertsLinesPolygonsAndStripsInVtksOrder) {
  put("a.vtk", kLegacy + "POLYDATA\nPOINTS 4 double\n" + kSquare +
                   "\nPOLYGONS 2 9\n3 0 1 2\n4 0 1 2 3\nTRIANGLE_STRIPS 1 5\n4 0 1 3 2\n"
                   "VERTICES 1 2\n1 3\nLINES 2 7\n2 0 1\n3 1 2 3\n"
                   "CELL_DATA 6\nSCALARS n int 1\nLOOKUP_TABLE default\n0 1 2 3 4 5\n");
  const MeshFile file = read_mesh(path("a.vtk"));
  expect_same(file.mesh, mixed_mesh({0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0}, {1, 3, 4, 5, 9, 6},
                                    {3, 0, 1, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 0, 1, 3, 2},
                                    {0, 1, 3, 6, 9, 13, 17}));
  EXPECT_TRUE(at::equal(file.cell_data.at("n"), at::arange(6, at::kInt)));
}

TEST_F(MeshFiles, OtherDataSetsBecomeCells) {
  put("a.vtk", kLegacy + "STRUCTURED_POINTS\nDIMENSIONS 3 2 2\nORIGIN 0 0 0\nSPACING 1 1 1\n");
  const Mesh mesh = read_mesh(path("a.vtk")).mesh;
  EXPECT_EQ(mesh.num_points(), 12);
  ASSERT_EQ(mesh.num_cells(), 2);
  EXPECT_EQ(mesh.kind_of(1), CellKind::voxel);
}

TEST_F(MeshFiles, ExodusKeepsBlocksThatShareTheirPoints) {
  for (const Mesh& mesh : {mixed_volume(), box_of_tetrahedra(2, 1, 1)}) {
    const at::Tensor heat = at::arange(mesh.num_points(), at::kDouble) * 0.25;
    const at::Tensor load = at::arange(mesh.num_cells(), at::kDouble) + 0.5;
    const at::Tensor count = at::arange(mesh.num_cells(), at::kLong);
    write_mesh(path("a.exo"), mesh, {{"heat", heat}}, {{"load", load}, {"count", count}});
    const MeshFile back = read_mesh(path("a.exo"));
    ASSERT_EQ(back.mesh.num_points(), mesh.num_points());
    ASSERT_EQ(back.mesh.num_cells(), mesh.num_cells());
    EXPECT_TRUE(at::equal(back.point_data.at("heat"), heat));
    // Cells come block by block, so they are found by their nodes.
    std::map<std::vector<int64_t>, int64_t> where;
    for (int64_t c = 0; c < mesh.num_cells(); ++c) {
      const auto nodes = back.mesh.nodes_of(c);
      where[{nodes.begin(), nodes.end()}] = c;
    }
    for (int64_t c = 0; c < mesh.num_cells(); ++c) {
      const auto nodes = mesh.nodes_of(c);
      ASSERT_TRUE(where.contains({nodes.begin(), nodes.end()})) << "cell " << c;
      const int64_t row = where.at({nodes.begin(), nodes.end()});
      EXPECT_EQ(back.mesh.kind_of(row), mesh.kind_of(c));
      EXPECT_EQ(back.cell_data.at("load")[row].item<double>(), load[c].item<double>());
      EXPECT_EQ(back.cell_data.at("count")[row].item<double>(), static_cast<double>(c));
    }
  }
}

std::vector<int64_t> numbers_in(const at::Tensor& field) {
  const at::Tensor longs = field.to(at::kLong).contiguous();
  const auto* first = longs.const_data_ptr<int64_t>();
  return {first, first + longs.numel()};
}

TEST_F(MeshFiles, PiecesCarryOwnersNumbersAndGhosts) {
  const Mesh mesh = box_of_cubes(6, 4, 3);
  const auto pieces = slabs_of(mesh);
  const Fields points = fields_of_rows(mesh.num_points());
  const at::Tensor number = at::arange(mesh.num_cells(), at::kLong);
  put("out_3.vtu", "of an earlier partition");
  const auto files = write_pieces(path("out.pvtu"), mesh, pieces, points, {{"number", number}});
  ASSERT_EQ(files.size(), 4U);  // the index, and a file of each part with cells
  EXPECT_EQ(fs::path(files[1]).filename(), "out_0.vtu");
  const std::string index = text_of("out.pvtu");
  EXPECT_NE(index.find("GhostLevel=\"2\""), std::string::npos);
  EXPECT_NE(index.find("GlobalIds=\"global_id\""), std::string::npos);
  for (size_t part = 0; part < 3; ++part) {
    const MeshFile file = read_mesh(files[part + 1]);
    const Piece& piece = pieces[part];
    EXPECT_EQ(numbers_in(file.cell_data.at("global_id")), piece.cells);
    EXPECT_EQ(numbers_in(file.point_data.at("global_id")), piece.points);
    EXPECT_TRUE(std::ranges::equal(file.mesh.blocks()[0].nodes.values, piece.nodes));
    expect_same(file.point_data, point_fields_of(piece, points));
    expect_same(file.cell_data, cell_fields_of(piece, {{"number", number}}));
    EXPECT_TRUE(at::equal(file.cell_data.at("number"), file.cell_data.at("global_id")));
    EXPECT_TRUE(at::equal(file.cell_data.at("owner"), at::tensor(piece.cell_owners, at::kInt)));
    EXPECT_TRUE(at::equal(file.point_data.at("owner"), at::tensor(piece.point_owners, at::kInt)));
    EXPECT_TRUE(at::equal(file.cell_data.at("vtkGhostType"),
                          at::tensor(piece.cell_layers, at::kInt).gt(0).to(at::kByte)));
  }
}

TEST_F(MeshFiles, OwnCellsOfAllPiecesAreTheMesh) {
  const Mesh mesh = box_of_cubes(6, 4, 3);
  const at::Tensor number = at::arange(mesh.num_cells(), at::kLong);
  (void)write_pieces(path("out.pvtu"), mesh, slabs_of(mesh), {}, {{"number", number}});
  const MeshFile whole = read_mesh(path("out.pvtu"));
  const at::Tensor own = whole.cell_data.at("vtkGhostType").eq(0);
  EXPECT_TRUE(
      at::equal(std::get<0>(whole.cell_data.at("number").masked_select(own).sort()), number));
}

using Broken = std::runtime_error;
using Wrong = std::invalid_argument;

TEST_F(MeshFiles, BrokenFilesAreRefusedWithTheCellsNumber) {
  const auto refused = [&](const std::string& name, const std::string& text,
                           const std::vector<std::string>& words) {
    put(name, text);
    expect_words<Wrong>([&] { (void)read_mesh(path(name)); }, words);
  };
  put("good.vtu", grid_text(kSquare, "0 1 2 0 2 3", "3 6", "5 5"));
  EXPECT_EQ(read_mesh(path("good.vtu")).mesh.num_cells(), 2);
  refused("a.vtu", grid_text(kSquare, "0 1 2 0 2 4", "3 6", "5 5"),
          {"read_mesh: ", "a.vtu", "cell 1 (triangle) names point 4; expected 0 to 3"});
  refused("b.vtu", grid_text(kSquare, "0 1 2 0 -7 3", "3 6", "5 5"), {"cell 1", "point -7"});
  refused("c.vtu", grid_text(kSquare, "0 1 2 0 2 2", "3 6", "5 5"), {"cell 1", "same point"});
  refused("d.vtu", grid_text(kSquare, "0 1 2 0 2 3", "4 6", "5 5"), {"cell 0", "lists 4 nodes"});
  refused("e.vtu", grid_text(kSquare, "0 1 2 0 2 3", "3 6", "5 99"), {"cell 1 has kind 99"});
  refused("f.vtu", grid_text("0 0 0 1 0 0 1 nan 0 0 1 0", "0 1 2 0 2 3", "3 6", "5 5"),
          {"coordinate 1 of point 2 is NaN"});
  refused("g.vtu", grid_text("", "", "", ""), {"g.vtu", "it is empty (0 points, 0 cells)"});
  refused("h.vtu", grid_text(kSquare, "", "", ""), {"it is empty (4 points, 0 cells)"});
  refused("i.vtk", kLegacy + "UNSTRUCTURED_GRID\nPOINTS 0 double\n", {"i.vtk", "it is empty"});
  refused("j.vtk",
          kLegacy + "POLYDATA\nPOINTS 4 double\n" + kSquare + "\nPOLYGONS 2 8\n3 0 1 2\n3 0 2 9\n",
          {"j.vtk", "cell 1 (triangle) names point 9"});
  refused("k.obj", "v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 7\n", {"k.obj", "cell 0", "point 6"});
}

TEST_F(MeshFiles, FilesTornAnywhereAreRefused) {
  const Mesh box = box_of_cubes(3, 3, 3);
  const Mesh square(
      Array<double>::owning({0, 0, 0, 1, 0, 0, 1, 1, 0, 0, 1, 0}), 3,
      {CellBlock::uniform(CellKind::triangle, Array<int64_t>::owning({0, 1, 2, 0, 2, 3}))});
  const at::Tensor ids = at::arange(64, at::kDouble) + 1;
  write_mesh(path("a.vtu"), box, {{"id", ids}});
  write_mesh(path("a.vtk"), box, {{"id", ids}});
  write_mesh(path("a.exo"), box, {{"id", ids}});
  write_mesh(path("a.ply"), mixed_surface());
  write_mesh(path("a.stl"), square);
  put("a.txt.ply",
      "ply\nformat ascii 1.0\nelement vertex 3\nproperty float x\nproperty float y\n"
      "property float z\nelement face 1\nproperty list uchar int vertex_indices\nend_header\n"
      "0 0 0\n1 0 0\n0 1 0\n3 0 1 2\n");
  put("a.txt.stl",
      "solid s\nfacet normal 0 0 1\nouter loop\nvertex 0 0 0\nvertex 1 0 0\nvertex 0 1 0\n"
      "endloop\nendfacet\nendsolid s\n");
  put("a.field.vtk", kLegacy + "UNSTRUCTURED_GRID\nFIELD FieldData 1\nTimeValue 1 1 double\n0\n" +
                         "POINTS 4 double\n" + kSquare + "\nCELLS 1 5\n4 0 1 2 3\nCELL_TYPES 1\n9");
  for (const std::string name :
       {"a.field.vtk", "a.vtu", "a.vtk", "a.exo", "a.ply", "a.stl", "a.txt.ply", "a.txt.stl"}) {
    const std::string whole = text_of(name);
    EXPECT_GE(read_mesh(path(name)).mesh.num_cells(), 1) << name;
    for (size_t tenths = 0; tenths < 10; ++tenths) {
      const std::string torn = std::to_string(tenths) + name;
      put(torn, whole.substr(0, whole.size() * tenths / 10));
      try {
        (void)read_mesh(path(torn));
        ADD_FAILURE() << tenths << " tenths of " << name << " were read";
      } catch (const std::exception& error) {
        EXPECT_NE(std::string(error.what()).find("read_mesh: "), std::string::npos);
        EXPECT_NE(std::string(error.what()).find(torn), std::string::npos) << error.what();
      }
    }
  }
}

TEST_F(MeshFiles, FilesOfOtherKindsAndMissingPiecesAreRefused) {
  expect_words<Broken>([&] { (void)read_mesh(path("none.vtu")); }, {"read_mesh: no file"});
  for (const std::string name : {"b.vtu", "b.vtk", "b.vtp", "b.pvtu", "b.ply", "b.stl", "b.exo"}) {
    put(name, "no mesh");
    expect_words<Broken>([&] { (void)read_mesh(path(name)); }, {"read_mesh: ", name});
  }
  const Mesh mesh = box_of_cubes(3, 3, 3);
  const auto files = write_pieces(path("c.pvtu"), mesh, slabs_of(mesh));
  fs::remove(files[1]);
  expect_words<Broken>([&] { (void)read_mesh(path("c.pvtu")); }, {"read_mesh: ", "c.pvtu"});
}

TEST_F(MeshFiles, WhatFormatsLackIsRefusedWithTheCellsNumber) {
  const Mesh mesh = box_of_cubes(1, 1, 1);
  const auto write = [&](const std::string& name, const Fields& points, const Fields& cells) {
    return [&, name] { write_mesh(path(name), mesh, points, cells); };
  };
  put("a.xyz", "1");
  expect_words<Wrong>([&] { (void)read_mesh(path("a.xyz")); }, {"expected .vtu, .pvtu", "a.xyz"});
  expect_words<Wrong>(write("a.xyz", {}, {}), {"expected .vtu, .vtk", "a.xyz"});
  expect_words<Wrong>(write("a.stl", {}, {}), {"cell 0 (hexahedron)"});
  expect_words<Wrong>([&] { write_mesh(path("a.stl"), mixed_surface()); }, {"cell 0 (quad)"});
  expect_words<Wrong>(write("a.stl", {{"heat", at::zeros({8})}}, {}),
                      {".stl files hold no fields"});
  expect_words<Wrong>(write("a.pvtu", {}, {}), {"write_pieces"});
  expect_words<Wrong>([&] { (void)write_pieces(path("a.vtu"), mesh, {}); }, {"ends in .pvtu"});
  expect_words<Wrong>([&] { (void)write_pieces(path("a.pvtu"), mesh, {}); },
                      {"at least one piece"});
  expect_words<Wrong>(write("a.vtu", {{"heat", at::zeros({3})}}, {}),
                      {"write_mesh: point field \"heat\": expected 8 rows, got 3"});
  expect_words<Wrong>(write("a.vtu", {}, {{"t", at::zeros({1, 3, 3})}}),
                      {"cell field \"t\": expected one or two dims, got 3"});
  expect_words<Wrong>(write("a.vtu", {}, {{"z", at::zeros({1}, at::kComplexDouble)}}),
                      {"cell field \"z\": mesh files lack the type"});
  put("file", "no folder");
  expect_words<Broken>(write("file/a.vtu", {}, {}), {"write_mesh: VTK", "file/a.vtu"});
  expect_words<Broken>([&] { (void)write_pieces(path("file/a.pvtu"), mesh, slabs_of(mesh)); },
                       {"write_pieces: VTK", "file/a.pvtu"});
}

}  // namespace
}  // namespace shardfield::graph
