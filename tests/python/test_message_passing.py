"""Reading and adding rows by a sharded index: the primitives of message passing.

Nodes cut over the ranks, edges cut over the ranks by the caller's own sizes: each row a rank lacks
travels once, nothing is gathered.
"""

from __future__ import annotations

import pytest
import torch
from oracle import (
    Cut,
    assert_equal,
    check_same_as_serial,
    full,
    is_sharded,
    numbers,
    scatter,
    sharded,
)
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

import shardfield

NODES, EDGES = 11, 29
LINKS = torch.randint(0, NODES, (2, EDGES), generator=torch.Generator().manual_seed(3))


def mean_of_neighbours(x: Tensor, weight: Tensor, links: Tensor) -> Tensor:
    """One layer as libraries write it: gather, scale, scatter_add with an expanded index."""
    source, target = links
    messages = x.index_select(0, source) * weight.unsqueeze(-1)
    index = target.unsqueeze(-1).expand_as(messages)
    total = torch.zeros_like(x).scatter_add_(0, index, messages)
    count = torch.zeros_like(x[:, 0]).index_add(0, target, torch.ones_like(weight))
    return torch.tanh(total / count.clamp(min=1).unsqueeze(-1)) + x


def by_brackets(x: Tensor, weight: Tensor, links: Tensor) -> Tensor:
    """x[index], negative numbers, two readings, index_add with alpha."""
    difference = x[links[0]] - x[links[1] - NODES]
    return x.index_add(0, links[1], difference * weight[:, None], alpha=2)


def edge_sizes(ranks: int) -> list[list[int] | None]:
    heavy = [0] * (ranks - 1) + [EDGES]
    return [None, heavy]


def layers(mesh) -> None:
    before: list = [Replicate()] * (mesh.ndim - 1)
    last = mesh.ndim - 1
    for sizes in edge_sizes(mesh.size(last)):
        options = {last: sizes} if sizes else {}
        links = sharded(LINKS, mesh, 1, sizes)

        def run(layer, a, b, links=links):
            return layer(a, b, links if is_sharded(a) else LINKS)

        x = Cut(numbers(NODES, 3), [*before, Shard(0)])
        weight = Cut(numbers(EDGES, seed=1), [*before, Shard(0)], options)
        for layer in (mean_of_neighbours, by_brackets):
            check_same_as_serial(
                lambda a, b, layer=layer, run=run: run(layer, a, b),
                [x, weight],
                mesh,
            )


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, layers)


def on_two_axes(mesh) -> None:
    """Nodes and edges cut by both axes; features cut by one axis while edges are cut by the other."""
    for nodes, edges in (
        ([Shard(0), Shard(0)], [Shard(1), Shard(1)]),
        ([Shard(0), Shard(1)], [Shard(1), Replicate()]),
        ([Shard(0), Replicate()], [Shard(1), Shard(1)]),
        ([Shard(1), Shard(0)], [Shard(1), Shard(1)]),
    ):
        x, links = scatter(Cut(numbers(NODES, 4), nodes), mesh), scatter(Cut(LINKS, edges), mesh)
        read = x.index_select(0, links[0])
        assert_equal(full(read), numbers(NODES, 4)[LINKS[0]], f"{nodes} {edges}")
        added = x.index_add(0, links[1], read)
        want = numbers(NODES, 4).index_add(0, LINKS[1], numbers(NODES, 4)[LINKS[0]])
        assert_equal(full(added), want, f"{nodes} {edges}")


def test_meshes_of_two_axes(run_mesh):
    run_mesh((2, 2), on_two_axes)


def volume(mesh) -> tuple[int, dict[str, int]]:
    n, width = 400, 8
    ring = torch.stack([torch.arange(n), (torch.arange(n) + 1) % n])
    x, links = sharded(numbers(n, width), mesh, 0), sharded(ring, mesh, 1)
    with shardfield.report() as report:
        y = x.index_select(0, links[1])
        x.index_add(0, links[1], y)
    return report.bytes_sent, dict(report.fallbacks)


@pytest.mark.parametrize("size", [2, 4])
def test_only_rows_of_others_travel(run_mesh, size):
    """On a ring each rank needs one row of its neighbour: rows, their numbers, counts, bounds."""
    results = run_mesh((size,), volume)
    assert not any(fallbacks for _, fallbacks in results)
    bound = size * 2 * (8 * 8 + 8) + 2 * 2 * (size - 1) * (size * size * 8 + 2 * 8)
    assert sum(sent for sent, _ in results) <= bound


def out_of_bounds(mesh) -> None:
    x = sharded(numbers(NODES, 3), mesh, 0)
    wrong = LINKS[0].clone()
    wrong[-1] = NODES
    for index in (wrong, -1 - LINKS[0]):
        with pytest.raises(IndexError, match="out of bounds"):
            x.index_select(0, sharded(index, mesh, 0))
    with pytest.raises(IndexError, match="out of bounds"):
        x[sharded(wrong, mesh, 0)]
    assert_equal(
        full(x.index_select(0, sharded(LINKS[0], mesh, 0))), numbers(NODES, 3)[LINKS[0]], ""
    )


def test_out_of_bounds_is_told_on_all_ranks(run_mesh):
    run_mesh((3,), out_of_bounds)
