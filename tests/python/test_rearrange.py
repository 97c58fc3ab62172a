"""flip, roll, repeat, tril, triu and their composites on whole and cut dims."""

from __future__ import annotations

import itertools
import random

import torch
from many_cases import check_cases
from oracle import Cut, assert_equal, check_same_as_serial, numbers, sharded
from torch.distributed.tensor import Shard

import shardfield

CASES = {
    "flip_1": lambda x: x.flip(1),
    "flip_all": lambda x: x.flip(0, 1, 2),
    "flip_last": lambda x: x.flip(-1) * x,
    "fliplr": torch.fliplr,
    "flipud": torch.flipud,
    "roll_1": lambda x: x.roll(2, 1),
    "roll_back": lambda x: x.roll(-3, 1),
    "roll_far": lambda x: x.roll(17, 1),
    "roll_two": lambda x: x.roll((1, -1), (0, 2)),
    "roll_same_dim_twice": lambda x: x.roll((1, 2), (1, 1)),
    "roll_flat": lambda x: x.roll(5),
    "repeat": lambda x: x.repeat(1, 2, 1),
    "repeat_all": lambda x: x.repeat(2, 1, 3, 2),
    "repeat_none": lambda x: x.repeat(1, 0, 1).sum() + x.sum(),
    "tile": lambda x: x.tile(2, 2),
    "repeat_interleave": lambda x: x.repeat_interleave(2, 1),
    "repeat_interleave_last": lambda x: x.repeat_interleave(3, -1),
    "rot90": lambda x: x.rot90(1, (1, 2)),
    "rot180": lambda x: x.rot90(2, (0, 1)),
    "tril": lambda x: x.tril(),
    "triu": lambda x: x.triu(1),
    "tril_back": lambda x: x.tril(-2),
    "movedim": lambda x: x.movedim(1, 2) * 2,
    "swapaxes": lambda x: x.swapaxes(0, 1) + 1,
    "narrow_copy": lambda x: torch.narrow_copy(x, 1, 1, 3),
    "unflatten": lambda x: x.flip(2).unflatten(2, (2, 2)),
    "diff": lambda x: x.diff(dim=1),
    "diff_2": lambda x: x.diff(n=2, dim=1),
    "gradient": lambda x: torch.gradient(x, dim=1),
    "channel_shuffle_like": lambda x: x.reshape(3, 7, 2, 2).transpose(2, 3).reshape(3, 7, 4),
}


def all_cases(mesh) -> None:
    check_cases(mesh, CASES, numbers(3, 7, 4), (0, 1, 2), no_fallback=True)


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, all_cases)


def flip_of_a_cut_dim(mesh) -> None:
    x = sharded(torch.arange(5.0), mesh, 0, [3, 2])
    assert_equal(x.flip(0), torch.tensor([4.0, 3, 2, 1, 0]), "flip")
    y = sharded(numbers(4, 3), mesh, 0)
    with shardfield.report() as report:
        y.flip(1)
        y.roll(1, 1)
        y.tril()
        y.repeat(1, 3)
    assert report.bytes_sent == 0, report


def test_B11_flip(run_mesh):
    run_mesh((2,), flip_of_a_cut_dim)


def rolled_bytes(mesh) -> None:
    """A roll by one moves one row between neighbours."""
    x = sharded(numbers(8, 3), mesh, 0)
    with shardfield.report() as report:
        x.roll(1, 0)
    assert report.bytes_sent == 3 * 8, report


def test_roll_moves_the_fewest_rows(run_mesh):
    run_mesh((4,), rolled_bytes)


def drawn(mesh, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(12):
        shape = [draw.randint(1, 7) for _ in range(draw.randint(1, 4))]
        dim, other = draw.randrange(len(shape)), draw.randrange(len(shape))
        shift, flips = (
            draw.randint(-9, 9),
            draw.sample(range(len(shape)), draw.randint(1, len(shape))),
        )
        sizes = {}
        if mesh.ndim == 1:
            parts = sorted(draw.randint(0, shape[dim]) for _ in range(mesh.size() - 1))
            ends = [0, *parts, shape[dim]]
            sizes = {0: [b - a for a, b in itertools.pairwise(ends)]}
        placements = [Shard(dim), Shard(other)][: mesh.ndim]
        if mesh.ndim == 2 and dim == other:
            continue
        try:
            check_same_as_serial(
                lambda x, s=shift, d=other, f=flips: torch.cat([x.roll(s, d), x.flip(f)], d),
                [Cut(numbers(*shape, seed=draw.randrange(100)), placements, sizes)],
                mesh,
            )
        except Exception as error:
            raise AssertionError(
                f"shape {shape} cut {dim},{other} {sizes} roll {shift} flip {flips} seed {seed}"
            ) from error


def test_drawn(run_mesh, mesh_shape):
    for seed in range(3):
        print(f"seed {seed}")
        run_mesh(mesh_shape, drawn, seed=seed)
