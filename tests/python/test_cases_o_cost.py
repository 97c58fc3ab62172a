"""CASES, kind O: cost, memory, parallelism that does nothing."""

from __future__ import annotations

import time

import pytest
import torch
from oracle import is_sharded, numbers, sharded
from shardfield.domain_parallel import ShardTensor
from test_convolution import peak_of
from torch import nn
from torch.distributed.tensor import Shard

import shardfield


def adds(mesh) -> float:
    """Microseconds that 1000 additions of (4, 4) blocks cost over plain ones, the best of 9."""
    plain = numbers(4, 4)
    x = sharded(numbers(4 * mesh.size(), 4), mesh, 0)
    best = {}
    for _ in range(9):
        for name, t in (("plain", plain), ("sharded", x)):
            start = time.perf_counter()
            for _ in range(1000):
                t = t + 1.0
            best[name] = min(best.get(name, 1e9), time.perf_counter() - start)
    return (best["sharded"] - best["plain"]) * 1e3


def test_o1_a_thousand_small_additions(run_mesh):
    assert max(run_mesh((2,), adds)) < 10


def wraps(mesh) -> None:
    piece = numbers(3, 5)
    shapes = {0: [(3, 5)] * mesh.size()}
    with shardfield.report() as report:
        for _ in range(5):
            x = ShardTensor.from_local(piece, mesh, [Shard(0)], sharding_shapes=shapes)
            x = ShardTensor.from_local(
                piece, mesh, [Shard(0)], sharding_shapes="chunk", global_shape=x.shape
            )
    assert is_sharded(x)
    assert (report.messages, report.bytes_sent) == (0, 0)


def test_o3_wrapping_known_pieces_sends_nothing(run_mesh):
    run_mesh((2,), wraps)


def training_peak(mesh) -> int:
    """Peak of the allocations of one forward and backward pass, in bytes."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.Conv2d(8, 1, 3, padding=1)
    ).double()
    x = sharded(numbers(1, 1, 192, 64), mesh, 2)
    net(x).square().mean().backward()
    net.zero_grad()
    _, peak = peak_of(lambda: net(x).square().mean().backward())
    return peak


@pytest.mark.parametrize("world", [2, 4])
def test_o5_memory_falls_with_the_ranks(run_mesh, world):
    (serial,) = run_mesh((1,), training_peak)
    assert max(run_mesh((world,), training_peak)) <= (1 / world + 0.15) * serial
