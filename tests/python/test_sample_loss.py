"""Losses of whole samples: margins over classes and CTC, cut by samples, classes or time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from many_cases import check_cases
from oracle import numbers

TARGET = torch.tensor([2, 0, 4, 1, 1, 3])
LABELS = torch.tensor([[1, 3, -1, 0, 0]]).expand(6, 5).contiguous()
WEIGHT = numbers(5, seed=3).abs()
WORDS = torch.tensor([[1, 2, 1], [2, 2, 3], [4, 1, 2], [3, 1, 4], [1, 1, 2], [2, 3, 4]])
LENGTHS = torch.tensor([3, 1, 2, 3, 2, 1])
FLAT = torch.cat([row[:n] for row, n in zip(WORDS, LENGTHS.tolist(), strict=True)])
TIMES = torch.tensor([8, 7, 8, 6, 8, 8])

MARGINS = {
    f"{name}_{reduction}": lambda x, f=f, reduction=reduction: f(x, reduction)
    for reduction in ("mean", "sum", "none")
    for name, f in {
        "margin": lambda x, r: F.multi_margin_loss(x, TARGET, weight=WEIGHT, reduction=r),
        "squares": lambda x, r: F.multi_margin_loss(x, TARGET, p=2, margin=0.5, reduction=r),
        "labels": lambda x, r: F.multilabel_margin_loss(x, LABELS, reduction=r),
    }.items()
}
SEQUENCES = {
    f"{name}_{reduction}": lambda x, f=f, reduction=reduction: f(x.log_softmax(-1), reduction)
    for reduction in ("mean", "sum", "none")
    for name, f in {
        "padded": lambda x, r: F.ctc_loss(x, WORDS, TIMES, LENGTHS, reduction=r),
        "joined": lambda x, r: F.ctc_loss(x, FLAT, TIMES, LENGTHS, reduction=r),
        "lists": lambda x, r: F.ctc_loss(
            x, WORDS, TIMES.tolist(), LENGTHS.tolist(), reduction=r, zero_infinity=True
        ),
    }.items()
}


def losses(mesh) -> None:
    # With samples and classes cut at once the classes' cut has nowhere to go.
    check_cases(mesh, MARGINS, numbers(6, 5), (0, 1), second=False, no_fallback=mesh.ndim == 1)
    check_cases(mesh, SEQUENCES, numbers(8, 6, 5), (0, 1, 2), second=False)


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, losses, limit_s=180)
