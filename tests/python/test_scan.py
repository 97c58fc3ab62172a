"""Cumulative ops along a cut dim: one row per rank travels, equal and NaN values included."""

from __future__ import annotations

import pytest
import torch
from many_cases import check_cases
from oracle import assert_equal, check_same_as_serial, numbers, sharded
from torch.distributed.tensor import Shard

import shardfield

SMOOTH = {
    "cumsum": lambda x: x.cumsum(1),
    "cumprod": lambda x: x.cumprod(1),
    "cumprod_zero": lambda x: (x * (x > 0.3)).cumprod(1),
    "logcumsumexp": lambda x: x.logcumsumexp(1),
    "cumsum_last": lambda x: x.cumsum(-1) ** 2,
    "of_a_view": lambda x: x.flatten(0, 1).cumsum(0),
    "flat": lambda x: x[0, :, 0].cumsum(0),
}
EXTREMA = {
    "cummax": lambda x: torch.cummax(x, 1).values,
    "cummin": lambda x: torch.cummin(x, 1).values,
}


def smooth(mesh) -> None:
    check_cases(mesh, SMOOTH, numbers(2, 7, 4), (0, 1, 2))
    check_cases(mesh, EXTREMA, numbers(2, 7, 4), (0, 1, 2), second=False)


def extrema_behind_a_norm(mesh) -> None:
    """A second derivative that goes on to an exchange, from ranks that hold nothing too."""
    for dim in (1, 2):
        check_same_as_serial(
            lambda x, dim=dim: torch.cummax(x.softmax(0), dim).values,
            [numbers(3, 4, 2)],
            mesh,
            [Shard(0)],
            sizes={0: [3] + [0] * (mesh.size() - 1)},
        )


@pytest.mark.parametrize("size", [2, 3])
def test_second_derivatives_where_ranks_hold_nothing(run_mesh, size):
    run_mesh((size,), extrema_behind_a_norm)


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, smooth)


def positions(mesh) -> None:
    tied = numbers(9, 3).mul(2).round()
    tied[3, 1] = tied[6, 0] = torch.nan
    for x in (tied, tied.nan_to_num(7.0).long(), torch.zeros(0, 3), tied[:1]):
        for op in (torch.cummax, torch.cummin):
            for got, want in zip(op(sharded(x, mesh, 0), 0), op(x, 0), strict=True):
                assert_equal(got, want, op.__name__)
    assert_equal(sharded(tied > 0, mesh, 0).cumsum(0), (tied > 0).cumsum(0), "counts")
    narrow = numbers(9, dtype=torch.float32)
    assert_equal(
        sharded(narrow, mesh, 0).cumsum(0, dtype=torch.float64),
        narrow.cumsum(0, dtype=torch.float64),
        "dtype",
    )


def test_positions_ties_nan_and_dtypes(run_mesh, mesh_shape):
    run_mesh(mesh_shape, positions)


def traffic(mesh) -> int:
    x = sharded(numbers(1000, 3), mesh, 0)
    with shardfield.report() as report:
        x.cumsum(0)
    assert not report.fallbacks
    return report.bytes_sent


@pytest.mark.parametrize("size", [2, 4])
def test_bytes_do_not_grow_with_the_length(run_mesh, size):
    assert sum(run_mesh((size,), traffic)) <= size * (size - 1) * 3 * 8
