"""local_map: a program for the pieces, called on whole tensors."""

from __future__ import annotations

import pytest
import torch
from oracle import Cut, assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from shardfield.domain_parallel import local_map
from torch.distributed.tensor import Partial, Replicate, Shard


def layouts(mesh, dim: int):
    cut = [Replicate()] * (mesh.ndim - 1) + [Shard(dim)]
    return cut, [Replicate()] * mesh.ndim


def partial_sum(mesh) -> None:
    cut, whole = layouts(mesh, 0)
    parts = [Replicate()] * (mesh.ndim - 1) + [Partial()]

    def serial(x, w):
        return (x @ w).sin().sum()

    def ours(x, w):
        if not is_sharded(x):
            return serial(x, w)
        return local_map(serial, [cut, whole], parts, mesh)(x, w)

    for sizes in ({}, {mesh.ndim - 1: [7] + [0] * (mesh.size(-1) - 1)}):
        check_same_as_serial(ours, [Cut(numbers(7, 4), cut, sizes)], mesh, plain=[numbers(4, 3)])


def rows_and_scale(mesh) -> None:
    """Two outputs: pieces, and a value equal on all ranks; the input arrives cut elsewhere."""
    cut, whole = layouts(mesh, 0)

    def rows(x, w):
        return x * w, (w * w).sum()

    def ours(x, w):
        if not is_sharded(x):
            return rows(x, w)
        return local_map(rows, [cut, whole], [cut, whole], mesh)(x, w)

    check_same_as_serial(
        ours, [numbers(7, 4)], mesh, [Shard(1)] * mesh.ndim, plain=[numbers(4, seed=1)]
    )


def plain_input(mesh) -> None:
    cut, _ = layouts(mesh, 1)
    double = local_map(lambda x, k: x * k, [cut, None], cut, mesh)
    y = double(numbers(2, 5), 3)
    assert is_sharded(y) and y.to_local().shape[1] <= 5
    assert_equal(full(y), 3 * numbers(2, 5), "plain input")


@pytest.mark.parametrize("case", [partial_sum, rows_and_scale, plain_input])
def test_same_as_serial(run_mesh, mesh_shape, case):
    run_mesh(mesh_shape, case)


def refusals(mesh) -> None:
    x = sharded(numbers(6, 2), mesh, 0)
    with pytest.raises(ValueError, match="one placement per mesh axis"):
        local_map(torch.sin, [[Shard(0), Shard(1)]], [Shard(0)], mesh)
    with pytest.raises(ValueError, match="positional arguments"):
        local_map(torch.add, [[Shard(0)]], [Shard(0)], mesh)(x, x)
    with pytest.raises(ValueError, match="out_placements"):
        local_map(torch.sin, [[Shard(0)]], [[Shard(0)], [Shard(0)]], mesh)(x)
    with pytest.raises(ValueError, match="Partial"):
        local_map(torch.sin, [[Partial()]], [Shard(0)], mesh)(x)


def test_what_does_not_fit_is_refused(run_mesh):
    run_mesh((2,), refusals)
