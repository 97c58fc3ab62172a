"""Pairwise distances: the rows of either side, the batch and the features cut."""

from __future__ import annotations

import pytest
import torch
from oracle import Cut, check_same_as_serial, is_sharded, numbers, scatter
from torch.distributed.tensor import Replicate, Shard

import shardfield

DISTANCES = {
    "one": lambda a, b: torch.cdist(a, b, p=1.0),
    "two": lambda a, b: torch.cdist(a, b, compute_mode="donot_use_mm_for_euclid_dist"),
    "product": lambda a, b: torch.cdist(a, b, compute_mode="use_mm_for_euclid_dist"),
}


def cases(mesh, first: int | None, second: int | None) -> None:
    def places(dim):
        return [Replicate() if dim is None else Shard(dim)] * mesh.ndim

    for name, distance in DISTANCES.items():
        for shapes in (((2, 7, 3), (2, 5, 3)), ((1, 7, 3), (4, 5, 3))):
            a, b = numbers(*shapes[0]), numbers(*shapes[1], seed=1)
            try:
                if second is None:
                    check_same_as_serial(
                        distance, [Cut(a, places(first))], mesh, plain=[b], second=False
                    )
                elif first is None:
                    check_same_as_serial(
                        lambda b, a, f=distance: f(a, b),
                        [Cut(b, places(second))],
                        mesh,
                        plain=[a],
                        second=False,
                    )
                else:
                    cuts = [Cut(a, places(first)), Cut(b, places(second))]
                    check_same_as_serial(distance, cuts, mesh, second=False)
            except AssertionError as error:
                raise AssertionError(f"{name} of {shapes}: {error}") from error


@pytest.mark.parametrize(
    ("first", "second"),
    [(1, None), (None, 1), (1, 1), (0, 0), (2, 1), (1, 0)],
    ids=lambda d: "plain" if d is None else f"dim{d}",
)
def test_same_as_serial(run_mesh, mesh_shape, first, second):
    run_mesh(mesh_shape, cases, first=first, second=second)


def rows_and_rows(mesh) -> int:
    a = scatter(Cut(numbers(40, 3), [Shard(0), Replicate()]), mesh)
    b = scatter(Cut(numbers(30, 3, seed=1), [Replicate(), Shard(0)]), mesh)
    with shardfield.report() as report:
        d = torch.cdist(a, b)
    assert is_sharded(d) and d.to_local().shape == (20, 15)
    torch.testing.assert_close(d.full_tensor(), torch.cdist(numbers(40, 3), numbers(30, 3, seed=1)))
    return report.bytes_sent


def test_each_axis_cuts_the_rows_of_one_side(run_mesh):
    assert run_mesh((2, 2), rows_and_rows) == [0, 0, 0, 0]


def uneven(mesh) -> None:
    a, b = numbers(6, 3), numbers(5, 3, seed=1)
    for sizes in ([6, 0, 0], [1, 0, 5]):
        for name, distance in DISTANCES.items():
            try:
                check_same_as_serial(
                    distance,
                    [Cut(a, [Shard(0)], {0: sizes}), Cut(b, [Shard(0)])],
                    mesh,
                    second=False,
                )
            except AssertionError as error:
                raise AssertionError(f"{name} {sizes}: {error}") from error


def test_uneven_and_empty_pieces(run_mesh):
    run_mesh((3,), uneven)
