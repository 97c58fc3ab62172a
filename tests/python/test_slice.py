"""Slices and splits: whole blocks of merged dims are views, other rows of them are moved."""

from __future__ import annotations

import pytest
import torch
from oracle import Cut, assert_equal, check_same_as_serial, full, numbers, scatter
from torch.distributed.tensor import Shard

import shardfield

SHAPE = (4, 9, 3)


def places(mesh) -> list[Shard]:
    return [Shard(1)] if mesh.ndim == 1 else [Shard(1), Shard(2)]


def samples(mesh) -> None:
    """Samples of a batch whose tokens are cut, out of the flattened batch: nothing travels."""
    x = numbers(*SHAPE)
    for begin, end in ((0, 9), (9, 27), (27, 36), (0, 36), (9, None)):
        check_same_as_serial(
            lambda t, b=begin, e=end: t.flatten(0, 1)[b:e].sin(), [Cut(x, places(mesh))], mesh
        )
    check_same_as_serial(
        lambda t: [part.exp().sum() for part in t.flatten(0, 1).split([9, 18, 9])],
        [Cut(x, places(mesh))],
        mesh,
    )
    cut = scatter(Cut(x, places(mesh)), mesh)
    with shardfield.report() as report:
        part = cut.flatten(0, 1)[9:27] * 2
    assert report.bytes_sent == 0
    assert_equal(part, x.flatten(0, 1)[9:27] * 2, "part")


def test_samples_of_a_flattened_batch(run_mesh, mesh_shape):
    run_mesh(mesh_shape, samples)


def writes(mesh) -> None:
    """What is written to the samples is in the tensor, with its gradient."""
    x, v = numbers(*SHAPE), numbers(18, 3, seed=1)

    def written(t: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        out = t * 1
        flat = out.flatten(0, 1)
        flat[9:27] = values
        flat[:9] *= 3
        return out * out

    cuts = [Cut(x, places(mesh)), Cut(v.unflatten(0, (2, 9)), places(mesh))]
    check_same_as_serial(lambda t, u: written(t, u.flatten(0, 1)), cuts, mesh)


def test_writes_to_samples(run_mesh, mesh_shape):
    run_mesh(mesh_shape, writes)


def rows_of_one_sample(mesh) -> None:
    """As of a tensor that is not merged: views, and what is written is there."""
    x = numbers(*SHAPE)
    for begin, end, step in ((9, 15, 1), (19, 27, 2), (28, 36, 3), (1, 4, 1)):

        def written(t: torch.Tensor, b=begin, e=end, s=step) -> torch.Tensor:
            out = t * 1
            out.flatten(0, 1)[b:e:s] *= 2
            return out * out + t.flatten(0, 1)[b:e:s].sin().sum()

        check_same_as_serial(written, [Cut(x, [Shard(1)] * mesh.ndim)], mesh)


def test_rows_of_one_sample(run_mesh):
    for size in (1, 2, 3, 4):
        run_mesh((size,), rows_of_one_sample)


def rows_between(mesh) -> None:
    """Rows that are no whole samples are a copy: right values, and writes are refused."""
    x = numbers(*SHAPE)
    for begin, end, step in ((3, 20, 1), (0, 36, 2), (9, 20, 1), (5, 5, 1)):
        check_same_as_serial(
            lambda t, b=begin, e=end, s=step: t.flatten(0, 1)[b:e:s].sin(),
            [Cut(x, places(mesh))],
            mesh,
        )
    flat = scatter(Cut(x, [Shard(1)] * mesh.ndim), mesh).flatten(0, 1)
    with pytest.raises(RuntimeError, match="write in place"):
        flat[3:20].mul_(2)
    assert_equal(full(flat), x.flatten(0, 1), "as it was")


def test_rows_between_samples(run_mesh):
    run_mesh((3,), rows_between)
