"""CASES, kind L: partitions of small and odd graphs, with every method that is here."""

from __future__ import annotations

import meshio
import numpy as np
import pytest
import torch
from test_partition import box

import shardfield.graph as graph

METHODS = ["levels", "metis", "kahip", "auto"]


def sizes(labels, parts):
    return sorted(np.bincount(labels, minlength=parts).tolist())


def ring(n):
    nodes = np.arange(n)
    return np.stack([nodes, (nodes + 1) % n])


@pytest.mark.parametrize("method", METHODS)
def test_l1_no_empty_parts(method):
    assert sizes(graph.partition_nodes(ring(5), 5, 5, method), 5) == [1, 1, 1, 1, 1]
    assert sizes(graph.partition_nodes([[0, 1], [1, 2]], 3, 2, method), 2) == [1, 2]
    assert sizes(graph.partition_nodes(ring(35), 35, 7, method), 7) == [5] * 7


@pytest.mark.parametrize("method", METHODS)
def test_l3_one_part(method):
    np.testing.assert_array_equal(graph.partition_nodes(ring(6), 6, 1, method), np.zeros(6))
    if method != "levels":
        np.testing.assert_array_equal(graph.partition_labels(box(2, 2, 2), 1, method), np.zeros(8))


@pytest.mark.parametrize("method", ["metis", "kahip", "auto", "levels"])
@pytest.mark.parametrize("tolerance", [0.0, 0.03, 0.5])
def test_l5_imbalance_is_what_was_asked(method, tolerance):
    number = np.arange(400).reshape(20, 20)
    edges = np.concatenate(
        [
            np.stack([number[:-1].ravel(), number[1:].ravel()]),
            np.stack([number[:, :-1].ravel(), number[:, 1:].ravel()]),
        ],
        axis=1,
    )
    labels = graph.partition_nodes(edges, 400, 7, method, tolerance=tolerance)
    counts = np.bincount(labels, minlength=7)
    assert counts.max() <= (1 + tolerance) * 400 / 7 + 1
    assert counts.min() > 0


@pytest.mark.parametrize("method", METHODS)
def test_l7_directed_repeated_and_self_edges(method):
    edges = np.array([[0, 1, 0, 2], [1, 0, 1, 2]])
    given = edges.copy()
    labels = graph.partition_nodes(edges, 3, 3, method)
    assert sizes(labels, 3) == [1, 1, 1]
    np.testing.assert_array_equal(edges, given)
    np.testing.assert_array_equal(np.bincount(edges[1], minlength=3), [1, 2, 1])


def test_l7_isolated_nodes_and_no_edges():
    assert sizes(graph.partition_nodes(np.zeros((2, 0), int), 6, 3, "auto"), 3) == [2, 2, 2]
    with pytest.raises(ValueError, match="edge 1 joins nodes 0 and 3; expected 0 to 2"):
        graph.partition_nodes([[0, 0], [1, 3]], 3, 2)


def rows_here(mesh):
    """Borders of the rows of 4 cells, from the pieces and from the sharded rows of their labels."""
    line = graph.Mesh([[0.0], [1], [2], [3], [4]], [("line", [[0, 1], [1, 2], [2, 3], [3, 4]])])
    result = graph.partition(line, mesh.size(), "hilbert")
    here = graph.HaloGraph([[0, 1, 2], [1, 2, 3]], 4, result.labels).on(mesh)
    own = here.shard_nodes(torch.arange(4)).to_local()
    assert own.tolist() == result[mesh.get_rank()].cells.tolist()
    counts = [len(piece.cells) for piece in result]
    return [0, *np.cumsum(counts).tolist()], [own[0].item(), own[-1].item() + 1]


def test_l9_borders_are_sums_of_counts(run_mesh):
    """4 cells, 2 ranks: 0, 2, 4. Counts in place of offsets are told from them."""
    answers = run_mesh((2,), rows_here)
    assert [borders for borders, _ in answers] == [[0, 2, 4]] * 2
    assert [ends for _, ends in answers] == [[0, 2], [2, 4]]
    points = [[0.0], [1], [2], [3], [4]]
    nodes, kinds = np.array([0, 1, 1, 2, 2, 3, 3, 4]), np.full(4, 3, np.uint8)
    graph.Mesh(points, [graph.CellBlock("mixed", nodes, np.arange(0, 9, 2), kinds)])
    with pytest.raises(ValueError, match="offsets"):
        graph.Mesh(points, [graph.CellBlock("mixed", nodes, np.array([2, 2, 2, 2]), kinds)])


@pytest.mark.parametrize("method", ["auto", "hilbert", "rcb", "metis", "kahip"])
def test_l11_more_parts_than_cells(method):
    line = graph.Mesh([[0.0], [1], [2], [3]], [("line", [[0, 1], [1, 2], [2, 3]])])
    result = graph.partition(line, 8, method, ghost_layers=1)
    assert sizes(result.labels, 8) == [0, 0, 0, 0, 0, 1, 1, 1]
    assert [len(p.cells) > 0 for p in result] == [c > 0 for c in result.quality.cells]


def test_l11_a_region_absent_on_a_piece_is_there_with_no_cells():
    mesh = box(4, 1, 1)
    mesh.cell_sets = {"A": [np.array([1, 2, 3])], "B": [np.array([0])]}
    pieces = graph.partition(mesh, 2, "rcb", ghost_layers=1)
    assert pieces[0].cell_sets()["B"].tolist() == [0]
    assert pieces[1].cell_sets()["B"].tolist() == []
    assert pieces[0].cell_sets()["A"].tolist() == [1]
    assert pieces[1].cell_sets()["A"].tolist() == [0, 1]


def broken_call():
    """The same bad weights on every rank."""
    try:
        graph.partition(box(2, 2, 2), 2, "metis", weights=np.full(8, np.nan))
    except ValueError as error:
        return str(error)
    return "no error"


def test_l11_a_failure_is_the_same_error_on_all_ranks(run_ranks):
    texts = run_ranks(2, broken_call)
    assert texts[0] == texts[1]
    assert "weight 0 is nan" in texts[0]


def labels_here():
    return graph.partition(random_points_mesh(), 3, "auto", ghost_layers=1).labels.tolist()


def random_points_mesh():
    draw = np.random.default_rng(5)
    cells = [draw.permutation(40)[:3] for _ in range(90)]
    return meshio.Mesh(draw.random((40, 2)), [("triangle", np.array(cells))])


def test_every_rank_gets_the_same_labels(run_ranks):
    answers = run_ranks(3, labels_here)
    assert answers[0] == answers[1] == answers[2] == labels_here()
