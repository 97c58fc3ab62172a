"""Softmax, log-softmax and logsumexp over cut and uncut dims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, check_same_as_serial, numbers, scatter
from torch.distributed.tensor import Shard

import shardfield

FUNCTIONS = {
    "softmax": lambda x, d: x.softmax(d),
    "log_softmax": lambda x, d: x.log_softmax(d),
    "softmin": lambda x, d: F.softmin(x, d),
    "logsumexp": lambda x, d: x.logsumexp(d),
    "logsumexp_keepdim": lambda x, d: x.logsumexp((0, d), keepdim=True) if d else x.logsumexp(0),
}


def every_dim(mesh, dims: tuple[int, ...], sizes: list[int] | None = None) -> None:
    x = numbers(4, sum(sizes) if sizes else 7, 5) * 3
    for name, function in FUNCTIONS.items():
        for dim in (0, 1, 2, -1):
            try:
                check_same_as_serial(
                    lambda t, f=function, d=dim: f(t, d % 3),
                    [Cut(x, [Shard(d) for d in dims], {0: sizes} if sizes else {})],
                    mesh,
                )
            except AssertionError as error:
                raise AssertionError(f"{name} over {dim} cut on {dims}: {error}") from error


@pytest.mark.parametrize("dim", range(3))
def test_softmax_family(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, every_dim, dims=(dim,) * len(mesh_shape))


def test_softmax_family_on_two_dims(run_mesh):
    run_mesh((2, 2), every_dim, dims=(1, 2))


@pytest.mark.parametrize("sizes", [[5, 0, 2], [0, 0, 7]])
def test_softmax_with_empty_pieces(run_mesh, sizes):
    run_mesh((3,), every_dim, dims=(1,), sizes=sizes)


def infinities(mesh) -> None:
    low, high = float("-inf"), float("inf")
    x = numbers(5, 6)
    x[0] = low  # a row that is masked everywhere
    x[1, 2:] = low
    x[2, 4] = high
    x[3] = 1e4
    x[4, 1] = float("nan")
    for dim in (0, 1):
        cut = scatter(Cut(x, [Shard(1)]), mesh)
        for name, function in FUNCTIONS.items():
            assert_equal(function(cut, dim), function(x, dim), f"{name} over {dim}")


def test_infinities_as_on_one_device(run_mesh):
    run_mesh((3,), infinities)


def traffic(mesh) -> list[int]:
    x = scatter(Cut(numbers(4, 8), [Shard(1)]), mesh)
    with shardfield.report() as whole:
        x.softmax(0)
    with shardfield.report() as cut:
        x.softmax(1)
    return [whole.bytes_sent, cut.bytes_sent]


def test_an_uncut_dim_sends_nothing(run_mesh):
    for none, some in run_mesh((2,), traffic):
        # Maximum (with its NaN flag) and sum of four rows in float64.
        assert none == 0 and 0 < some <= 3 * 4 * 8


def half_type(mesh) -> None:
    x = numbers(4, 8).bfloat16()
    cut = scatter(Cut(x, [Shard(1)]), mesh)
    for dim in (0, 1):
        assert cut.softmax(dim).dtype == torch.bfloat16
        assert_equal(
            cut.softmax(dim, dtype=torch.float32), x.softmax(dim, dtype=torch.float32), "", 1e-6
        )
        assert_equal(cut.log_softmax(dim), x.log_softmax(dim), "", 2e-2)


def test_half_types(run_mesh):
    run_mesh((2,), half_type)
