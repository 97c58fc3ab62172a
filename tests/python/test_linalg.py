"""Batches of matrices with fewer entries than ranks: every rank stays in the graph."""

from __future__ import annotations

import pytest
import torch
from oracle import check_same_as_serial, numbers
from torch.distributed.tensor import Shard


def least_squares(mesh, rows: int) -> None:
    """Lstsq leaves out the residuals of some shapes, on ranks without a matrix too."""
    a, b = numbers(2, rows, 3), numbers(2, rows, 2, seed=1)
    check_same_as_serial(
        lambda x: torch.linalg.lstsq(x, b)[:2], [a], mesh, [Shard(0)], second=False
    )


@pytest.mark.parametrize("rows", [2, 3, 5])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_lstsq(run_mesh, size, rows):
    run_mesh((size,), least_squares, rows=rows)


def decompositions(mesh) -> None:
    a = numbers(2, 3, 3) @ numbers(2, 3, 3).mT + 3 * torch.eye(3).double()
    for f in (
        torch.linalg.inv,
        torch.linalg.det,
        torch.linalg.eigvalsh,
        torch.linalg.svdvals,
        torch.linalg.cholesky,
        lambda x: torch.linalg.qr(x).R,
        lambda x: torch.linalg.solve(x, numbers(2, 3, 1)),
        torch.linalg.pinv,
        torch.linalg.matrix_exp,
    ):
        check_same_as_serial(lambda x, f=f: f(x @ x.mT), [a], mesh, [Shard(0)], second=False)


@pytest.mark.parametrize("size", [3, 4])
def test_decompositions(run_mesh, size):
    run_mesh((size,), decompositions)
