"""The copying forms of views, and ops that work on each batch entry by itself."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from many_cases import check_cases
from oracle import numbers

COPIES = {
    "unsqueeze_copy": lambda x: torch.unsqueeze_copy(x, 1) ** 2,
    "slice_copy": lambda x: torch.slice_copy(x, 1, 1, 4),
    "permute_copy": lambda x: torch.permute_copy(x, (2, 0, 1)),
    "split_copy": lambda x: torch.split_copy(x, 2, 1),
    "slice_scatter": lambda x: torch.slice_scatter(x, x[:, :2] * 3, 1, 2, 4),
    "select_scatter": lambda x: torch.select_scatter(x, x[:, 0] * 2, 1, 3),
    "diagonal_scatter": lambda x: torch.diagonal_scatter(x, x[:, 0, :3] * 2, 1, 1, 2),
    "unsafe_split": lambda x: torch.unsafe_split(x, 3, 1),
    "diag_embed": lambda x: torch.diag_embed(x, 1),
    "diag_embed_dims": lambda x: torch.diag_embed(x, -2, 0, 2),
    "rsub": lambda x: torch.rsub(x, x[:, :1], alpha=2),
    "floor_divide": lambda x: torch.floor_divide(x.detach(), 0.3),
}

BATCHED = {
    "inv": lambda x: torch.linalg.inv(x @ x.mT + torch.eye(5, dtype=x.dtype)),
    "cholesky": lambda x: torch.linalg.cholesky(x @ x.mT + torch.eye(5, dtype=x.dtype)),
    "solve": lambda x: torch.linalg.solve(x @ x.mT + torch.eye(5, dtype=x.dtype), x),
    "det": lambda x: torch.linalg.det(x[..., :4, :4]),
    "svdvals": lambda x: torch.linalg.svdvals(x),
    "fft": lambda x: torch.fft.rfft2(x).abs() ** 2,
    "ifft": lambda x: torch.fft.ifft(torch.fft.fft(x, dim=1), dim=1).real * x,
    "cdist": lambda x: torch.cdist(x, numbers(3, 4, seed=2)),
}


def copies(mesh) -> None:
    check_cases(mesh, COPIES, numbers(2, 5, 4), (0, 1, 2))


def test_copies_of_views(run_mesh, mesh_shape):
    run_mesh(mesh_shape, copies)


def batched(mesh) -> None:
    check_cases(mesh, BATCHED, numbers(3, 5, 4), (0, 1, 2), second=False, no_fallback=False)


def test_batched(run_mesh, mesh_shape):
    run_mesh(mesh_shape, batched)


def unpooling(mesh) -> None:
    def there_and_back(x):
        y, index = F.max_pool2d(x, 2, return_indices=True)
        return F.max_unpool2d(y, index, 2)

    check_cases(mesh, {"unpool": there_and_back}, numbers(3, 2, 6, 4), (0, 1, 2, 3), second=False)


def test_unpooling(run_mesh, mesh_shape):
    run_mesh(mesh_shape, unpooling)
