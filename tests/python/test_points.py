"""Nearest points and points within a radius: every index and distance as brute force has them."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from drawing import base_seed
from oracle import (
    Cut,
    assert_equal,
    check_same_as_serial,
    full,
    is_sharded,
    numbers,
    sharded,
)
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import shardfield
from shardfield.points import knn, radius_search


def brute_order(points: Tensor, queries: Tensor) -> tuple[Tensor, Tensor]:
    """All points of each query by distance, equal ones by index: indices and distances."""
    squared = (queries.double()[:, None] - points.double()[None]).square().sum(-1)
    ordered, order = squared.sort(dim=1, stable=True)
    return order, ordered.sqrt()


def on_grid(count: int, dims: int, seed: int) -> Tensor:
    """Points of a small grid, many twice: ties everywhere, all distances exact."""
    return torch.randint(
        0, 4, (count, dims), generator=torch.Generator().manual_seed(seed)
    ).double()


def pairs_within(points: Tensor, queries: Tensor, radius: float) -> tuple[Tensor, Tensor]:
    """Brute force's pairs, (2, pairs), and their distances."""
    order, distances = brute_order(points, queries)
    near = distances.square() <= radius * radius
    return torch.stack([near.nonzero()[:, 0], order[near]]), distances[near]


# ------------------------------------------------------------------------------ on one device


@pytest.mark.parametrize("dims", [1, 2, 3, 5])
def test_plain_searches_equal_brute_force(dims):
    for points, queries in (
        (numbers(60, dims), numbers(17, dims, seed=1)),
        (on_grid(60, dims, 0), on_grid(17, dims, 1)),
        (numbers(40, dims).float(), numbers(40, dims).float()),
    ):
        order, distances = brute_order(points, queries)
        for k in (1, 3, len(points)):
            found, away = knn(points, queries, k)
            assert torch.equal(found, order[:, :k])
            assert_equal(away, distances[:, :k].to(points.dtype), "distances")
        want, wanted = pairs_within(points, queries, 1.0)
        pairs, away = radius_search(points, queries, 1.0, return_dists=True)
        assert torch.equal(pairs, want)
        assert_equal(away, wanted.to(points.dtype), "distances")


def test_gradients_of_plain_searches():
    points, queries = (numbers(30, 3, seed=i).requires_grad_() for i in range(2))
    order, _ = brute_order(points.detach(), queries.detach())
    want = (points[order[:, :4]] - queries[:, None]).norm(dim=-1)
    _, got = knn(points, queries, 4)
    for ours, theirs in zip(
        torch.autograd.grad(got.sin().sum(), (points, queries)),
        torch.autograd.grad(want.sin().sum(), (points, queries)),
        strict=True,
    ):
        assert_equal(ours, theirs, "gradient")
    assert knn(points, points, 1)[1].sum().backward() is None
    assert not points.grad.any(), "a point's distance from itself has gradient 0"


# ------------------------------------------------------------------------------ on several ranks


def searches(points: Tensor, queries: Tensor, radius: float, most: int) -> list[Tensor]:
    """Every form of result."""
    return [
        *knn(points, queries, most),
        radius_search(points, queries, radius),
        *radius_search(points, queries, radius, None, True, True),
        *radius_search(points, queries, radius, most, True, True),
    ]


def same_as_plain(mesh, dims: int) -> None:
    cut = [Shard(0)] * mesh.ndim
    for points, queries in (
        (numbers(41, dims), numbers(23, dims, seed=1)),
        (on_grid(41, dims, 0), on_grid(23, dims, 1)),
        (numbers(5, dims), numbers(3, dims)),
    ):

        def run(p: Tensor, q: Tensor) -> list[Tensor]:
            return searches(p, q, 1.0, 4)

        both = check_same_as_serial(run, [points, queries], mesh, cut)
        assert all(is_sharded(t) for t in both)
        check_same_as_serial(run, [points], mesh, cut, plain=[queries], output_sharded=False)
        check_same_as_serial(
            lambda q, p: run(p, q), [queries], mesh, cut, plain=[points], output_sharded=True
        )
        check_same_as_serial(run, [Cut(points, [Shard(1)] * mesh.ndim), Cut(queries, cut)], mesh)


@pytest.mark.parametrize("dims", [1, 3])
def test_sharded_searches_equal_plain_ones(run_mesh, mesh_shape, dims):
    run_mesh(mesh_shape, same_as_plain, dims=dims)


def one_axis_each(mesh) -> None:
    points, queries = on_grid(30, 2, 0), on_grid(20, 2, 1)
    for first, second in itertools.permutations([[Shard(0), Replicate()], [Replicate(), Shard(0)]]):
        check_same_as_serial(
            lambda p, q: searches(p, q, 1.0, 3), [Cut(points, first), Cut(queries, second)], mesh
        )


def test_points_and_queries_cut_along_different_axes(run_mesh):
    run_mesh((2, 2), one_axis_each)


def drawn(mesh, seed: int) -> None:
    rng = random.Random(seed)
    parts, dims = mesh.size(), rng.randint(1, 4)
    sizes = [[rng.choice((0, 1, 7, 30)) for _ in range(parts)] for _ in range(2)]
    sizes[0][rng.randrange(parts)] += 2
    kind = rng.choice((on_grid, lambda n, d, s: numbers(n, d, seed=s)))
    points, queries = (kind(sum(n), dims, seed + i) for i, n in enumerate(sizes))
    radius, most = rng.choice((0.0, 0.5, 1.0, 9.0)), rng.randint(1, sum(sizes[0]))
    order, distances = brute_order(points, queries)
    p, q = (sharded(x, mesh, 0, n) for x, n in ((points, sizes[0]), (queries, sizes[1])))
    where = f"seed {seed}: {sizes} of {dims} dims, radius {radius}, {most} points"
    found, away = knn(p, q, most)
    assert torch.equal(full(found), order[:, :most]), where
    assert_equal(away, distances[:, :most], where)
    pairs, away = radius_search(p, q, radius, return_dists=True)
    want, wanted = pairs_within(points, queries, radius)
    assert torch.equal(full(pairs), want), where
    assert_equal(away, wanted, where)


def draws(mesh, first: int) -> None:
    for seed in range(first, first + 25):
        drawn(mesh, seed)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_drawn_searches_equal_brute_force(run_mesh, size):
    run_mesh((size,), draws, first=base_seed())


def points_on_a_line(mesh) -> None:
    line = torch.arange(8.0).double()[:, None]
    for order in (range(8), (5, 2, 7, 0, 3, 6, 1, 4)):
        x = sharded(line[list(order)], mesh, 0)
        query = full(radius_search(x, x, 1.5))[0]
        counts = query.bincount(minlength=8)[torch.tensor(order).argsort()]
        assert counts.tolist() == [2, 3, 3, 3, 3, 3, 3, 2]


def test_m13_radius_search_of_a_cut_line(run_mesh, mesh_shape):
    if len(mesh_shape) == 1:
        run_mesh(mesh_shape, points_on_a_line)


# ------------------------------------------------------------------------------ cost and faults


def shell(mesh) -> tuple[int, int, int]:
    """Bytes sent by a search among sorted points, and those of the points that have a neighbour on
    another rank, and of all in the shell: within the radius of another rank's bounding box.
    """
    count, radius, ranks = 4000, 0.01, mesh.size()
    points = numbers(count, 2).sigmoid()
    points = points[points[:, 0].argsort()]
    x = sharded(points, mesh, 0)
    with shardfield.report() as report:
        radius_search(x, x, radius)
    own, rank = x.to_local(), mesh.get_local_rank()
    needed = near = 0
    for other, theirs in enumerate(points.split([count // ranks] * ranks)):
        if other == rank:
            continue
        needed += int((torch.cdist(own, theirs).min(1).values <= radius).sum())
        outside = own - own.clamp(theirs.amin(0), theirs.amax(0))
        near += int((outside.norm(dim=1) <= radius).sum())
    return report.bytes_sent, needed * (2 * 8 + 8), near * (2 * 8 + 8)


def test_only_the_shell_travels(run_mesh):
    # Beside the points: sizes and flags, 32 boxes of 6 numbers, counts; each an all-gather.
    for ranks in (2, 4):
        for sent, needed, near in run_mesh((ranks,), shell):
            tables = (ranks - 1) * 8 * (5 + 32 * 6 + ranks)
            pairs = (ranks - 1) * 2 * 8  # how many pairs each rank has
            assert needed <= sent - tables - pairs <= near, (sent, tables, needed, near)


def faults(mesh) -> list[str]:
    last = mesh.get_local_rank() == mesh.size() - 1
    x = sharded(numbers(12, 2), mesh, 0)
    holed = numbers(12, 2)
    holed[11, 1] = math.nan
    calls = [
        lambda: knn(x, x, 13),
        lambda: knn(x, numbers(3, 3), 1),
        lambda: knn(x, numbers(3, 2).float(), 1),
        lambda: radius_search(x, x, -1.0),
        lambda: radius_search(x, x, math.nan),
        lambda: radius_search(x, x, 1.0, 0),
        lambda: knn(x, sharded(holed, mesh, 0), 1),
        lambda: knn(x, x, 2 + last),
        lambda: radius_search(x, numbers(5 + last, 2), 1.0),
        lambda: knn(x.unsqueeze(0), x.unsqueeze(0), 1),
    ]
    texts = []
    for call in calls:
        with pytest.raises(RuntimeError) as caught:
            call()
        texts.append(str(caught.value).splitlines()[0])
    assert_equal(knn(x, x, 1)[1], torch.zeros(12, 1).double(), "the group is good after the errors")
    return texts


def test_wrong_calls_are_refused_on_every_rank(run_mesh):
    for texts in run_mesh((3,), faults):
        for text, part in zip(
            texts,
            [
                "knn: expected k from 1 to the 12 points, got 13",
                "expected points (n, dims) and queries (m, dims), got [12, 2] and [3, 3]",
                "of one dtype, got Double and Float",
                "expected a finite radius of at least 0, got -1",
                "expected a finite radius of at least 0, got nan",
                "expected max_points of at least 1, got 0",
                "expected finite coordinates, got NaN or infinity on",
                "the same k or radius and the same sizes on every rank",
                "the same k or radius and the same sizes on every rank",
                "got [1, 12, 2] and [1, 12, 2]; search the samples of a batch one by one",
            ],
            strict=True,
        ):
            assert part in text, text
