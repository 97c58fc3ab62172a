"""out= of reductions, products and rearrangements: plain and sharded targets."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_equal, full, numbers, sharded

import shardfield

CALLS = {
    "sum": lambda x, out=None: torch.sum(x, 1, out=out),
    "mean": lambda x, out=None: torch.mean(x, 0, out=out),
    "amax": lambda x, out=None: torch.amax(x, 1, keepdim=True, out=out),
    "cumsum": lambda x, out=None: torch.cumsum(x, 0, out=out),
    "matmul": lambda x, out=None: torch.matmul(x, numbers(5, 3), out=out),
    "cat": lambda x, out=None: torch.cat([x, x], 1, out=out),
    "index_select": lambda x, out=None: torch.index_select(x, 0, torch.tensor([3, 0]), out=out),
    "softmax": lambda x, out=None: torch.softmax(x, 1, out=out),
    "linear norm": lambda x, out=None: torch.linalg.vector_norm(x, dim=1, out=out),
}


def targets(mesh) -> None:
    x = numbers(6, 5)
    for dim in (0, 1):
        s = sharded(x, mesh, dim)
        for name, call in CALLS.items():
            want = call(x)
            plain = torch.empty(0, dtype=torch.float64)
            with shardfield.report() as report:
                assert call(s, plain) is plain
            assert_equal(plain, want, name)
            assert not report.fallbacks, name
            for cut in range(want.dim()):
                target = sharded(torch.zeros_like(want), mesh, cut)
                call(s, target)
                assert_equal(full(target), want, f"{name} into a cut on {cut}")


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, targets)


def refusals(mesh) -> None:
    s = sharded(numbers(6, 5), mesh, 0)
    with pytest.raises(RuntimeError, match="automatic differentiation"):
        torch.sum(s.detach().requires_grad_(), 1, out=torch.empty(6))
    with pytest.raises(RuntimeError, match="out= has sizes"):
        torch.sum(s, 1, out=sharded(numbers(4), mesh, 0))


def test_refusals(run_mesh):
    run_mesh((2,), refusals)
