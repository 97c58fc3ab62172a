"""Partitions of meshes: sizes, ghosts and plans; meshio++ as the oracle of labels and ghosts."""

from __future__ import annotations

import itertools
import os
import pickle
import subprocess
import sys

import meshio
import meshioplusplus
import numpy as np
import pytest
import pyvista
import torch
from vtkmodules.vtkCommonDataModel import vtkUnstructuredGrid

import shardfield.graph as graph

CUBE = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)]


def box(nx: int, ny: int, nz: int, scale: tuple[float, ...] = (1, 1, 1)) -> meshio.Mesh:
    """A box of hexahedra."""
    axes = [np.arange(n + 1) * s for n, s in zip((nx, ny, nz), scale, strict=True)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    number = np.arange(len(points)).reshape(nx + 1, ny + 1, nz + 1)
    cells = [number[x : x + nx, y : y + ny, z : z + nz].ravel() for x, y, z in CUBE]
    return meshio.Mesh(points, [("hexahedron", np.stack(cells, 1))])


def random_tetrahedra(seed: int) -> meshio.Mesh:
    """Not a sensible mesh, but every label and ghost of it is defined."""
    draw = np.random.default_rng(seed)
    cells = [draw.permutation(60)[:4] for _ in range(150)]
    return meshio.Mesh(draw.random((60, 3)) * (3, 1, 2), [("tetra", np.array(cells))])


def mixed_surface() -> meshio.Mesh:
    """Quads on the left, triangles on the right."""
    points = np.stack(np.meshgrid(np.arange(9.0), np.arange(5.0), indexing="ij"), -1)
    number = np.arange(45).reshape(9, 5)
    corners = [number[:-1, :-1], number[1:, :-1], number[1:, 1:], number[:-1, 1:]]
    quads = np.stack([c[:4].ravel() for c in corners], 1)
    right = np.stack([c[4:].ravel() for c in corners], 1)
    triangles = np.concatenate([right[:, [0, 1, 2]], right[:, [0, 2, 3]]])
    flat = np.pad(points.reshape(-1, 2), ((0, 0), (0, 1)))
    return meshio.Mesh(flat, [("quad", quads), ("triangle", triangles)])


MESHES = {
    "cubes": box(5, 5, 5),
    "odd box": box(9, 4, 3, (0.3, 1.7, 1.0)),
    "slab": box(17, 13, 1, (0.1, 0.1, 0.1)),
    "tetrahedra": random_tetrahedra(0),
    "surface": mixed_surface(),
}


def other_library(mesh: meshio.Mesh) -> meshioplusplus.Mesh:
    return meshioplusplus.Mesh(mesh.points, [(b.type, b.data) for b in mesh.cells])


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("parts", [2, 3, 7, 16])
def test_hilbert_labels_equal_meshioplusplus(name, parts):
    mesh = MESHES[name]
    expected = meshioplusplus.partition_labels(other_library(mesh), parts, method="sfc")
    np.testing.assert_array_equal(
        graph.partition_labels(mesh, parts, "hilbert"), np.concatenate(expected)
    )


def test_weighted_hilbert_labels_equal_meshioplusplus():
    mesh = box(6, 5, 4)
    weights = np.random.default_rng(1).random(120)
    other = meshioplusplus.Mesh(
        mesh.points, [(b.type, b.data) for b in mesh.cells], cell_data={"w": [weights]}
    )
    expected = meshioplusplus.partition_labels(other, 7, method="sfc", weights="w")
    np.testing.assert_array_equal(
        graph.partition_labels(mesh, 7, "hilbert", weights=weights), expected[0]
    )


@pytest.mark.parametrize("name", MESHES)
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_ghost_layers_equal_meshioplusplus(name, layers):
    mesh = MESHES[name]
    theirs = meshioplusplus.partition(
        other_library(mesh), 4, method="sfc", ghost_layers=layers, record_ids=True
    )
    ours = graph.partition(mesh, 4, "hilbert", ghost_layers=layers)
    assert len(ours) == len(theirs) == 4
    for piece, other in zip(ours, theirs, strict=True):
        ghost = np.concatenate(other.cell_data["partition:ghost"])
        cells = np.concatenate(other.cell_data["partition:original_cell_id"])
        # Its cell numbers start again with every block.
        first = np.cumsum([0, *(len(b.data) for b in mesh.cells)])[:-1]
        cells = cells + np.repeat(first, [len(b.data) for b in other.cells])
        order = np.argsort(cells)
        mine = np.argsort(piece.cells)
        np.testing.assert_array_equal(piece.cells[mine], cells[order])
        np.testing.assert_array_equal(piece.cell_layers[mine] > 0, ghost[order] > 0)


@pytest.mark.parametrize("method", ["auto", "hilbert", "morton", "rcb", "metis", "kahip"])
def test_sizes_differ_by_at_most_one_cell(method):
    for parts in (1, 2, 5, 11):
        sizes = np.bincount(graph.partition_labels(box(7, 5, 6), parts, method), minlength=parts)
        assert len(sizes) == parts
        assert sizes.max() - sizes.min() <= 1


def test_the_pip_wheels_are_found():
    assert {"hilbert", "morton", "rcb", "metis", "kahip"} <= set(graph.methods())


@pytest.mark.parametrize("method", ["metis", "kahip", "scotch"])
def test_an_absent_library_is_an_error_that_names_it(method):
    code = (
        "import shardfield.graph as g\n"
        "m = g.Mesh([[0.], [1.], [2.]], [('line', [[0, 1], [1, 2]])])\n"
        f"assert {method!r} not in g.methods()\n"
        f"try: g.partition_labels(m, 2, {method!r})\n"
        "except RuntimeError as e: print(e)\n"
        "print(g.partition_labels(m, 2, 'auto'))"
    )
    environment = {**os.environ, f"SHARDFIELD_{method.upper()}": "/no/such/library.so"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f'method "{method}" needs a library that was not found' in done.stdout
    assert "[0 1]" in done.stdout


def test_labels_with_ghosts_are_refused_with_the_reason():
    with pytest.raises(ValueError, match="a cell can be a ghost of several parts"):
        graph.partition_labels(box(2, 2, 2), 2, ghost_layers=1)


def test_what_comes_in_goes_out():
    from_meshio = box(4, 3, 2)
    from_meshio.cell_data["volume"] = [np.arange(24.0)]
    from_meshio.point_data["heat"] = np.arange(60.0)
    grid = pyvista.ImageData(dimensions=(5, 4, 3)).cast_to_unstructured_grid()
    for whole, kind in ((from_meshio, meshio.Mesh), (grid, pyvista.UnstructuredGrid)):
        piece = graph.partition(whole, 3, "rcb", ghost_layers=1)[1]
        assert isinstance(piece.mesh, kind)
    piece = graph.partition(from_meshio, 3, "rcb", ghost_layers=1)[1]
    np.testing.assert_array_equal(piece.mesh.cell_data["volume"][0], piece.cells)
    np.testing.assert_array_equal(piece.mesh.point_data["heat"], piece.points)
    np.testing.assert_array_equal(piece.mesh.points, from_meshio.points[piece.points])
    corners = piece.points[piece.mesh.cells[0].data]
    np.testing.assert_array_equal(corners, from_meshio.cells[0].data[piece.cells])
    own = graph.partition(graph.Mesh(from_meshio.points, [("vertex", np.arange(60))]), 3, "rcb")
    assert isinstance(own[0].mesh, graph.Mesh)


def test_arrays_are_borrowed():
    points = np.random.default_rng(0).random((10, 3))
    nodes = np.arange(8).reshape(2, 4)
    mesh = graph.Mesh(points, [("tetra", nodes)])
    assert mesh.points is points
    assert np.shares_memory(mesh.blocks[0].nodes, nodes)


@pytest.mark.parametrize(
    ("points", "cells", "text"),
    [
        ([[0.0, 0], [1, 0], [0, np.nan]], [[0, 1, 2]], "coordinate 1 of point 2 is NaN"),
        ([[0.0, 0], [1, 0], [0, 1]], [[0, 1, 3]], "cell 0 .triangle. names point 3"),
        ([[0.0, 0], [1, 0], [0, 1]], [[0, 1, 2], [2, 1, 2]], "cell 1 .triangle. has the same"),
        ([[0.0, 0], [1, 0], [0, 1]], np.zeros((0, 3), int), "it is empty"),
        ([[0.0, 0], [1, 0], [0, 1]], [[0, 1]], r"expected nodes \(num_cells, 3\)"),
        (
            [[0.0, 0], [1, 0], [0, 1]],
            [[0, 1, 2.7]],
            "expected whole numbers of points, got float64",
        ),
        ([[0j, 0], [1, 0], [0, 1]], [[0, 1, 2]], "expected real coordinates, got complex128"),
    ],
)
def test_broken_meshes_name_the_cell(points, cells, text):
    with pytest.raises(ValueError, match=text):
        graph.Mesh(points, [("triangle", cells)])
    with pytest.raises((ValueError, TypeError)):
        graph.partition(object(), 2)


def test_blocks_of_an_unknown_kind_or_of_fractions():
    for block, text in (
        (graph.CellBlock("trio", np.arange(3)), "cells of kind 'trio' are not known"),
        (graph.CellBlock("triangle", np.arange(3.0)), "whole numbers of points, got float64"),
    ):
        with pytest.raises(ValueError, match=text):
            graph.Mesh(np.eye(3), [block])


def test_vtk_data_sets_and_containers_of_them():
    grid = vtkUnstructuredGrid()
    grid.ShallowCopy(pyvista.ImageData(dimensions=(3, 3, 3)).cast_to_unstructured_grid())
    assert isinstance(graph.partition(grid, 2)[0].mesh, pyvista.UnstructuredGrid)
    several = pyvista.MultiBlock([pyvista.Cube(), pyvista.Sphere()])
    for call in (graph.Mesh.from_pyvista, lambda mesh: graph.partition(mesh, 2)):
        with pytest.raises(TypeError, match="pyvista data set, got MultiBlock"):
            call(several)


def test_cell_sets_of_meshio_go_through():
    """Also those that lack a block, and on the pieces that meshio gets."""
    mesh = mixed_surface()
    quads, triangles = (len(b.data) for b in mesh.cells)
    mesh.cell_sets = {
        "both": [np.array([1, 3]), np.array([0])],
        "right": [None, np.arange(triangles)],
    }
    whole = graph.Mesh.from_meshio(mesh)
    assert whole.cell_sets["both"].tolist() == [1, 3, quads]
    assert whole.cell_sets["right"].tolist() == list(range(quads, quads + triangles))
    for piece in graph.partition(mesh, 3, "rcb", ghost_layers=1):
        rows = piece.cell_sets()
        first = np.cumsum([0, *(len(b.data) for b in piece.mesh.cells)])
        for name, blocks in piece.mesh.cell_sets.items():
            assert len(blocks) == len(piece.mesh.cells)
            got = np.concatenate([b + f for b, f in zip(blocks, first, strict=False)])
            np.testing.assert_array_equal(got, rows[name])


def test_counts_that_are_no_whole_numbers():
    for counts in ({"num_parts": 2.0}, {"num_parts": "2"}, {"num_parts": 2, "ghost_layers": 1.5}):
        with pytest.raises(TypeError, match=r"partition: expected a whole number for (num|ghost)_"):
            graph.partition(box(2, 2, 2), **counts)


def test_fields_and_weights_of_the_wrong_length():
    mesh = box(2, 2, 2)
    with pytest.raises(ValueError, match="cell data 'a' has shape"):
        graph.Mesh(mesh.points, [("hexahedron", mesh.cells[0].data)], cell_data={"a": [1, 2]})
    with pytest.raises(ValueError, match=r"expected weights of shape \(8,\)"):
        graph.partition(mesh, 2, weights=[1.0, 2.0])
    with pytest.raises(ValueError, match="no cell data 'cost'"):
        graph.partition(mesh, 2, weights="cost")


def test_weights_by_name_and_as_a_tensor():
    mesh = box(8, 4, 4)
    cost = np.where(np.arange(128) < 64, 1.0, 3.0)
    mesh.cell_data["cost"] = [cost]
    by_name = graph.partition(mesh, 4, "rcb", weights="cost")
    assert by_name.quality.imbalance < 1.06
    np.testing.assert_array_equal(
        by_name.labels, graph.partition_labels(mesh, 4, "rcb", weights=torch.from_numpy(cost))
    )


@pytest.mark.parametrize("method", ["auto", "hilbert", "rcb", "metis", "kahip"])
def test_the_unit_of_weights_does_not_matter(method):
    """Cell volumes in cubic metres of a mesh of microns, say."""
    mesh, weights = box(5, 4, 3), np.random.default_rng(0).random(60)
    want = graph.partition(mesh, 7, method, weights=weights)
    for unit in (2.0**-60, 2.0**-900, 2.0**900):
        got = graph.partition(mesh, 7, method, weights=weights * unit)
        np.testing.assert_array_equal(got.labels, want.labels)
        np.testing.assert_allclose(got.quality.loads, want.quality.loads * unit)


def test_contact_by_facet_and_radius():
    mesh = box(6, 6, 1)
    by_point = graph.partition(mesh, 4, "rcb", ghost_layers=1)
    by_facet = graph.partition(mesh, 4, "rcb", ghost_layers=1, contact="facet")
    by_radius = graph.partition(mesh, 4, "rcb", ghost_layers=1, contact="radius", radius=1.1)
    wide = graph.partition(mesh, 4, "rcb", ghost_layers=1, contact="radius", radius=2.1)
    assert [len(p.cells) - 9 for p in by_point] == [7] * 4
    assert [len(p.cells) - 9 for p in by_facet] == [6] * 4
    for a, b in zip(by_facet, by_radius, strict=True):
        np.testing.assert_array_equal(a.cells, b.cells)
    # Two cells deep straight across, and the corner cell at distance sqrt(2).
    assert [len(p.cells) - 9 for p in wide] == [13] * 4
    with pytest.raises(ValueError, match="unknown contact"):
        graph.partition(mesh, 4, contact="edge")


def exchanged(pieces, values):
    """Own rows stay, ghosts get their owners' values."""
    out = [np.array(v) for v in values]
    for piece, target in zip(pieces, out, strict=True):
        for owner, rows in piece.cell_exchange.receives.items():
            target[rows] = values[owner][pieces[owner].cell_exchange.sends[piece.part]]
    return out


def test_the_plan_brings_every_ghost_its_owners_value():
    result = graph.partition(box(7, 6, 5), 6, ghost_layers=2)
    values = [np.where(p.cell_layers == 0, p.cells, -1) for p in result]
    for piece, got in zip(result, exchanged(result.pieces, values), strict=True):
        np.testing.assert_array_equal(got, piece.cells)
    owned = np.concatenate([p.cells[: p.num_owned_cells] for p in result])
    np.testing.assert_array_equal(np.sort(owned), np.arange(210))


def test_meshes_pieces_and_partitions_are_pickled():
    mesh = mixed_surface()
    mesh.cell_data["number"] = [np.arange(16), np.arange(16, 48)]
    result = graph.partition(mesh, 3, "rcb", ghost_layers=1)
    again = pickle.loads(pickle.dumps(result))
    assert again.mesh.num_cells == result.mesh.num_cells == 48
    np.testing.assert_array_equal(again.mesh.centroids(), result.mesh.centroids())
    for a, b in zip(again, result, strict=True):
        for got, want in zip(a.connectivity(), b.connectivity(), strict=True):
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(a.cell_data()["number"], b.cells)
        assert a.point_exchange.receives == b.point_exchange.receives
        assert isinstance(a.mesh, meshio.Mesh)
    values = [np.where(p.cell_layers == 0, p.cells, -1) for p in again]
    for piece, got in zip(again, exchanged(again.pieces, values), strict=True):
        np.testing.assert_array_equal(got, piece.cells)


def test_cut_by_labels_takes_a_partition_from_elsewhere():
    mesh = box(4, 4, 4)
    result = graph.partition(mesh, 4, "rcb", ghost_layers=1)
    again = graph.cut_by_labels(mesh, result.labels, ghost_layers=1)
    for a, b in itertools.product(result, again):
        if a.part == b.part:
            np.testing.assert_array_equal(a.cells, b.cells)
    assert again.quality.largest_halo == result.quality.largest_halo
    with pytest.raises(ValueError, match="cell 3 has label 4; expected 0 to 3"):
        graph.cut_by_labels(mesh, np.where(np.arange(64) == 3, 4, 0), num_parts=4)


def test_auto_reports_what_it_tried_and_is_the_best():
    result = graph.partition(box(12, 4, 4), 6, ghost_layers=1)
    names = [t.method for t in result.trials]
    assert {"hilbert", "rcb", "metis", "kahip"} <= set(names)
    assert any(name.endswith("+ swaps") for name in names)
    assert result.quality.largest_halo == min(t.largest_halo for t in result.trials)
    steps: list[str] = []
    graph.partition(box(3, 3, 3), 2, progress=steps.append)
    assert {"hilbert", "rcb", "ghosts and exchange plans", "quality"} <= set(steps)


def test_threads_do_not_show():
    mesh = random_tetrahedra(3)
    one = graph.partition(mesh, 5, ghost_layers=2, num_threads=1)
    many = graph.partition(mesh, 5, ghost_layers=2, num_threads=4)
    np.testing.assert_array_equal(one.labels, many.labels)
    for a, b in zip(one, many, strict=True):
        np.testing.assert_array_equal(a.cells, b.cells)
        np.testing.assert_array_equal(a.points, b.points)


def test_polygons_and_vertices_of_meshio():
    mesh = meshio.Mesh(
        np.array([[0.0, 0], [1, 0], [2, 0], [2, 1], [1, 2], [0, 1], [3, 3]]),
        [("polygon", [[0, 1, 4, 5]]), ("polygon", [[1, 2, 3], [1, 3, 4]]), ("vertex", [[6]])],
    )
    whole = graph.Mesh.from_meshio(mesh)
    assert whole.num_cells == 4
    result = graph.partition(mesh, 2, "rcb", ghost_layers=1)
    back = result[0].to_meshio()
    assert sum(len(b.data) for b in back.cells) == len(result[0].cells)
    assert result.quality.fragments.sum() >= 3
