"""Labels of meshes that no rank holds whole: the same as one rank gives."""

from __future__ import annotations

import numpy as np
import pytest
from test_partition import MESHES

import shardfield.graph as graph


def borders_of(cut: str, cells: int, ranks: int) -> list[int]:
    """Where each rank's cells begin: evenly, nearly all on the last rank, or none on the first."""
    if cut == "even":
        return [cells * r // ranks for r in range(ranks + 1)]
    if cut == "last":
        return [*range(ranks), cells]
    return [0, *[cells * r // max(1, ranks - 1) for r in range(ranks)]] if ranks > 1 else [0, cells]


def range_of(mesh, begin: int, end: int):
    """Cells begin .. end - 1 with only the points that they need; None for none."""
    if begin == end:
        return None
    whole = graph.Mesh.from_meshio(mesh)
    offsets, nodes = whole.flat_cells()
    used, local = np.unique(nodes[offsets[begin] : offsets[end]], return_inverse=True)
    block = graph.CellBlock(
        "mixed", local, offsets[begin : end + 1] - offsets[begin], whole.kinds[begin:end]
    )
    return graph.Mesh(whole.points[used], [block])


def labels_here(mesh, name: str, cut: str, parts: int, method: str):
    whole = MESHES[name]
    borders = borders_of(cut, sum(len(b.data) for b in whole.cells), mesh.size())
    rank = mesh.get_rank()
    own = range_of(whole, borders[rank], borders[rank + 1])
    return graph.partition_labels(own, parts, method, over=mesh).tolist()


@pytest.mark.parametrize("cut", ["even", "last", "none first"])
@pytest.mark.parametrize("name", ["odd box", "tetrahedra", "surface"])
def test_ranges_get_the_labels_of_the_whole(run_mesh, ranks, name, cut):
    for parts, method in ((2, "hilbert"), (7, "hilbert"), (5, "morton")):
        answers = run_mesh((ranks,), labels_here, name=name, cut=cut, parts=parts, method=method)
        together = [label for answer in answers for label in answer]
        np.testing.assert_array_equal(together, graph.partition_labels(MESHES[name], parts, method))


def errors_here(mesh, own, **arguments):
    texts = []
    for rank, given in ((0, own), (1, own)):
        try:
            graph.partition_labels(
                given if mesh.get_rank() == rank else None, 3, over=mesh, **arguments
            )
        except (ValueError, TypeError) as error:
            texts.append(str(error))
    return texts


def parts_here(mesh):
    """Rank 1 asks for half a part more."""
    own = range_of(MESHES["surface"], 0, 4)
    try:
        graph.partition_labels(own, 2.5 if mesh.get_rank() else 2, "hilbert", over=mesh)
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def test_parts_that_are_no_whole_number_on_one_rank(run_mesh):
    answers = run_mesh((2,), parts_here)
    assert "ranks [1] cannot use" in answers[0]
    assert "expected a whole number for num_parts, got 2.5" in answers[1]


def test_a_fault_on_one_rank_is_an_error_on_all(run_mesh):
    answers = run_mesh((2,), errors_here, own="not a mesh", method="hilbert")
    assert "expected a shardfield.graph.Mesh" in answers[0][0]
    assert "ranks [0] cannot use the cells" in answers[1][0]
    assert "ranks [1] cannot use the cells" in answers[0][1]
    for texts in run_mesh((2,), errors_here, own=None, method="hilbert"):
        assert "no rank has any cells" in texts[0]
    for texts in run_mesh((2,), errors_here, own=None, method="rcb"):
        assert 'expected method "hilbert" or "morton"' in texts[0]


def different_wishes(mesh):
    own = range_of(MESHES["cubes"], 0, 10)
    with pytest.raises(ValueError, match="ask for different parts and methods"):
        graph.partition_labels(own, 3 + mesh.get_rank(), "hilbert", over=mesh)


def test_ranks_that_disagree_are_told(run_mesh):
    run_mesh((2,), different_wishes)
