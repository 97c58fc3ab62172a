"""Mesh files through meshio and pyvista, pieces as PVTU, and the command line."""

from __future__ import annotations

import subprocess
import sys

import meshio
import numpy as np
import pytest
import pyvista
from shardfield._command_line import main
from test_partition import box, mixed_surface
from vtkmodules.vtkFiltersParallel import vtkRemoveGhosts

import shardfield.graph as graph


def with_fields(mesh: meshio.Mesh) -> meshio.Mesh:
    mesh.point_data["heat"] = np.arange(len(mesh.points)) * 0.5
    sizes = [len(b.data) for b in mesh.cells]
    numbers = np.arange(sum(sizes))
    mesh.cell_data["number"] = np.split(numbers, np.cumsum(sizes)[:-1])
    return mesh


@pytest.mark.parametrize("suffix", [".vtu", ".vtk"])
def test_a_written_mesh_reads_back(tmp_path, suffix):
    path = tmp_path / f"mesh{suffix}"
    whole = graph.Mesh.from_meshio(with_fields(mixed_surface()))
    assert graph.write_mesh(path, whole) == [path]
    back = graph.read_mesh(path)
    assert (back.num_points, back.num_cells) == (whole.num_points, whole.num_cells)
    np.testing.assert_array_equal(back.cell_data["number"], whole.cell_data["number"])
    np.testing.assert_array_equal(back.point_data["heat"], whole.point_data["heat"])
    for ours, theirs in zip(back.flat_cells(), whole.flat_cells(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("suffix", [".msh", ".mesh", ".inp"])
def test_other_volume_formats_go_through_meshio(tmp_path, suffix):
    path = tmp_path / f"mesh{suffix}"
    whole = graph.Mesh.from_meshio(box(3, 2, 2))
    assert graph.write_mesh(path, whole) == [path]
    back = graph.read_mesh(path)
    np.testing.assert_allclose(back.points, whole.points)
    for ours, theirs in zip(back.flat_cells(), whole.flat_cells(), strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("suffix", [".stl", ".ply", ".obj"])
def test_surface_formats_are_read(tmp_path, suffix):
    path = tmp_path / f"ball{suffix}"
    ball = pyvista.Sphere(theta_resolution=12, phi_resolution=10)
    ball.save(path) if suffix != ".obj" else meshio.write(
        path, meshio.Mesh(ball.points, [("triangle", ball.faces.reshape(-1, 4)[:, 1:])])
    )
    mesh = graph.read_mesh(path)
    assert mesh.num_cells == ball.n_cells
    assert len(graph.partition(mesh, 3, ghost_layers=1)) == 3


def test_meshio_reads_what_pyvista_wrote_and_back(tmp_path):
    grid = graph.Mesh.from_meshio(with_fields(box(3, 2, 2))).to_pyvista()
    grid.save(tmp_path / "a.vtu")
    theirs = meshio.read(tmp_path / "a.vtu")
    np.testing.assert_array_equal(theirs.cells[0].data, box(3, 2, 2).cells[0].data)
    assert graph.Mesh.from_meshio(theirs).num_cells == 12


def test_pieces_are_written_as_pvtu_that_vtk_understands(tmp_path):
    result = graph.partition(with_fields(box(6, 5, 4)), 5, ghost_layers=2)
    written = graph.write_mesh(tmp_path / "out.pvtu", result)
    assert [p.name for p in written] == ["out.pvtu", *(f"out_{i}.vtu" for i in range(5))]
    assert 'GhostLevel="2"' in written[0].read_text()
    assert 'GlobalIds="global_id"' in written[0].read_text()
    whole = pyvista.read(tmp_path / "out.pvtu")
    own = np.asarray(whole.cell_data["vtkGhostType"]) == 0
    assert own.sum() == 120
    assert len(own) == sum(len(p.cells) for p in result)
    number = np.asarray(whole.cell_data["number"])
    np.testing.assert_array_equal(number, whole.cell_data["global_id"])
    np.testing.assert_array_equal(np.sort(number[own]), np.arange(120))
    np.testing.assert_array_equal(result.labels[number], whole.cell_data["owner"])
    remover = vtkRemoveGhosts()
    remover.SetInputDataObject(whole)
    remover.Update()
    assert remover.GetOutput().GetNumberOfCells() == 120


def test_pieces_read_back_with_their_plans(tmp_path):
    result = graph.partition(box(6, 5, 4), 5, ghost_layers=2)
    graph.write_mesh(tmp_path / "out.pvtu", result)
    back = graph.read_partition(tmp_path / "out.pvtu")
    assert [p.part for p in back] == [0, 1, 2, 3, 4]
    for ours, piece in zip(back, result, strict=True):
        np.testing.assert_array_equal(ours.cells, piece.cells)
        np.testing.assert_array_equal(ours.points, piece.points)
        np.testing.assert_array_equal(ours.point_owners, piece.point_owners)
        for got, want in (
            (ours.cell_exchange, piece.cell_exchange),
            (ours.point_exchange, piece.point_exchange),
        ):
            assert got.receives == want.receives
            assert list(got.sends) == list(want.sends)
            for part, rows in got.sends.items():
                np.testing.assert_array_equal(rows, want.sends[part])


def test_empty_pieces_leave_no_file(tmp_path):
    line = graph.Mesh([[0.0], [1], [2], [3]], [("line", [[0, 1], [1, 2], [2, 3]])])
    result = graph.partition(line, 5, "hilbert", ghost_layers=1)
    assert sum(len(p.cells) == 0 for p in result) == 2
    graph.write_mesh(tmp_path / "line.pvtu", result)
    whole = pyvista.read(tmp_path / "line.pvtu")
    assert (np.asarray(whole.cell_data["vtkGhostType"]) == 0).sum() == 3


def test_plans_from_files_name_parts_where_some_are_empty(tmp_path):
    labels = np.array([0, 0, 0, 3, 3, 3, 5, 5])
    result = graph.cut_by_labels(box(8, 1, 1), labels, 7, ghost_layers=1)
    graph.write_mesh(tmp_path / "out.pvtu", result)
    back = graph.read_partition(tmp_path / "out.pvtu")
    assert [p.part for p in back] == [0, 3, 5]
    for piece in back:
        for got, want in (
            (piece.cell_exchange, result[piece.part].cell_exchange),
            (piece.point_exchange, result[piece.part].point_exchange),
        ):
            assert got.receives == want.receives
            assert {p: r.tolist() for p, r in got.sends.items()} == {
                p: r.tolist() for p, r in want.sends.items()
            }


def test_two_files_of_one_part_are_refused(tmp_path):
    graph.write_mesh(tmp_path / "out.pvtu", graph.partition(box(2, 2, 2), 2, ghost_layers=1))
    (tmp_path / "out_1.vtu").write_bytes((tmp_path / "out_0.vtu").read_bytes())
    with pytest.raises(ValueError, match=r"out_0\.vtu and out_1\.vtu both hold part 0"):
        graph.read_partition(tmp_path / "out.pvtu")


def test_pieces_are_those_that_the_index_names(tmp_path):
    """Not files of an earlier partition into more, nor of another whose name begins alike."""
    mesh = box(4, 4, 3)
    folder = tmp_path / "a [1]*"
    folder.mkdir()
    graph.write_mesh(folder / "out.pvtu", graph.partition(mesh, 6, "rcb", ghost_layers=1))
    result = graph.partition(mesh, 4, "rcb", ghost_layers=1)
    written = graph.write_mesh(folder / "out.pvtu", result)
    graph.write_mesh(folder / "out_1.pvtu", graph.partition(mesh, 2, "hilbert"))
    assert [p.name for p in written] == ["out.pvtu", *(f"out_{i}.vtu" for i in range(4))]
    for ours, piece in zip(graph.read_partition(folder / "out.pvtu"), result, strict=True):
        np.testing.assert_array_equal(ours.cells, piece.cells)


def test_an_absent_index_or_piece_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file '.*none\.pvtu'"):
        graph.read_partition(tmp_path / "none.pvtu")
    graph.write_mesh(tmp_path / "out.pvtu", graph.partition(box(2, 2, 2), 4))
    with pytest.raises(ValueError, match=r"out_0\.vtu' is no \.pvtu file"):
        graph.read_partition(tmp_path / "out_0.vtu")
    (tmp_path / "out_2.vtu").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"names the piece 'out_2\.vtu', which is not there"
    ):
        graph.read_partition(tmp_path / "out.pvtu")


BROKEN = {
    ".vtu": b"<VTKFile",
    ".msh": b"hello",
    ".ply": b"ply\nformat ascii 1.0\n",
    ".off": b"OFF",
    ".stl": b"\0" * 300,
    ".foo": b"?",
    ".obj": b"v 0 0 0\nv 1 0 0\nv 0 1 0\nf 1 2 9\n",
    ".xdmf": b"<Xdmf>",
    ".e": b"?",
}


@pytest.mark.parametrize("suffix", BROKEN)
@pytest.mark.filterwarnings("ignore:The VTK reader")
def test_a_file_that_cannot_be_read_is_an_error_with_its_name(tmp_path, capsys, suffix):
    path = tmp_path / f"torn{suffix}"
    path.write_bytes(BROKEN[suffix])
    with pytest.raises((ValueError, ImportError), match=rf"read_mesh: .*torn\{suffix}"):
        graph.read_mesh(path)
    assert main(["partition", str(path), "-n", "2"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("shardfield partition: read_mesh: ")


def test_errors_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file"):
        graph.read_mesh(tmp_path / "none.vtu")
    with pytest.raises(ValueError, match=r"written as \.pvtu"):
        graph.write_mesh(tmp_path / "out.vtu", graph.partition(box(2, 2, 2), 2))
    box_grid = graph.Mesh.from_meshio(box(2, 2, 2)).to_pyvista()
    box_grid.save(tmp_path / "plain_0.vtu")
    (tmp_path / "plain.pvtu").write_text(
        '<VTKFile type="PUnstructuredGrid"><PUnstructuredGrid><Piece Source="plain_0.vtu"/>'
        "</PUnstructuredGrid></VTKFile>"
    )
    with pytest.raises(ValueError, match="has no cell array 'owner'"):
        graph.read_partition(tmp_path / "plain.pvtu")


def test_the_picture_shows_every_piece(tmp_path):
    from matplotlib.image import imread

    places = np.stack(np.meshgrid(np.arange(6.0), np.arange(6.0)), -1).reshape(-1, 2)
    chain = graph.Mesh(places, [("line", np.stack([np.arange(35), np.arange(1, 36)], 1))])
    dots = graph.Mesh(places, [("vertex", np.arange(36))])
    for mesh in (box(4, 4, 4), mixed_surface(), chain, dots):
        path = graph.draw(tmp_path / "pieces.png", graph.partition(mesh, 4, "rcb"))
        pixels = imread(path)[..., :3].reshape(-1, 3)
        # Each piece has a hue of its own: shades of one colour differ in length alone.
        colored = pixels[np.ptp(pixels, axis=1) > 0.15]
        hues = colored / np.linalg.norm(colored, axis=1, keepdims=True)
        found: list[np.ndarray] = []
        for hue in np.unique(hues.round(2), axis=0):
            if all(hue @ other < 0.995 for other in found):
                found.append(hue)
        assert len(found) >= 4


def test_the_command_writes_pieces_and_a_table(tmp_path, capsys):
    graph.write_mesh(tmp_path / "in.vtu", box(8, 6, 4))
    arguments = f"partition {tmp_path / 'in.vtu'} -n 6 --ghost-layers 2 -o {tmp_path / 'out.pvtu'}"
    picture = tmp_path / "out.png"
    assert main([*arguments.split(), "--picture", str(picture)]) == 0
    text = capsys.readouterr().out
    for word in ("rcb", "largest halo", "cut", "imbalance", "32 to 32", "time"):
        assert word in text
    assert picture.stat().st_size > 1000
    whole = pyvista.read(tmp_path / "out.pvtu")
    assert (np.asarray(whole.cell_data["vtkGhostType"]) == 0).sum() == 192


def test_the_command_says_what_is_wrong_in_one_line(tmp_path, capsys):
    graph.write_mesh(tmp_path / "in.vtu", box(2, 2, 2))
    assert main(["partition", str(tmp_path / "in.vtu"), "-n", "0"]) == 1
    assert "expected at least 1 part, got 0" in capsys.readouterr().err
    assert main(["partition", str(tmp_path / "none.vtu"), "-n", "2"]) == 1
    assert "no file" in capsys.readouterr().err


def test_the_command_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "shardfield", "--help"], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0
    assert "partition" in done.stdout
