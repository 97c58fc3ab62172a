"""Published cases, kind D: the geometry of convolution, pooling, padding and resampling."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from oracle import (
    arange,
    full,
    sharded,
)
from shardfield.domain_parallel import shard_tensor
from torch.distributed.tensor import Replicate, Shard

import shardfield


def ones_kernel(k: int) -> torch.Tensor:
    return torch.ones(1, 1, k, dtype=torch.float64)


def line(mesh, length: int, sizes: list[int] | None = None) -> torch.Tensor:
    return sharded(arange(1, 1, length), mesh, 2, sizes)


def one_rank(mesh) -> None:
    for cut_axis in range(mesh.ndim):
        placements = [Replicate()] * mesh.ndim
        placements[cut_axis] = Shard(2)
        x = shard_tensor(arange(1, 1, 8), mesh, placements).requires_grad_()
        w = ones_kernel(3).requires_grad_()
        F.conv1d(x, w, padding=1).sum().backward()
        assert full(x.grad).flatten().tolist() == [2, 3, 3, 3, 3, 3, 3, 2]
        assert w.grad.flatten().tolist() == [21, 28, 28]


def test_D5_one_rank_and_a_mesh_axis_of_size_one(run_mesh):
    run_mesh((1,), one_rank)
    run_mesh((2, 1), one_rank)
    run_mesh((1, 2), one_rank)


def input_without_gradient(mesh) -> None:
    x, w = line(mesh, 8), ones_kernel(3).requires_grad_()
    loss = F.conv1d(x, w, padding=1).sum()
    with shardfield.report() as report:
        loss.backward()
    assert w.grad.flatten().tolist() == [21, 28, 28]
    assert report.bytes_sent <= 64, "only the weight's gradient may travel"


def test_D11_input_without_gradient(run_mesh):
    run_mesh((2,), input_without_gradient)


def causal_convolution(mesh) -> None:
    for _ in range(5):  # poison what a fresh buffer may reuse
        torch.full((4096,), float("nan"), dtype=torch.float64)
        x = F.pad(line(mesh, 4) + 1, (2, 0))
        y = F.conv1d(x, ones_kernel(3))
        assert full(y).flatten().tolist() == [1, 3, 6, 9]


def test_D15_causal_convolution_reads_no_unfilled_memory(run_mesh):
    run_mesh((4,), causal_convolution)
