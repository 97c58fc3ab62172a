"""Randomised: pointwise operators, reductions, views, norms, matrix products."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from drawing import Drawn, values


def linear(rng: random.Random) -> Drawn:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    wide = rng.randint(1, 5)
    bias = [values(rng, wide)] if rng.random() < 0.5 else []
    return Drawn(
        f"linear to {wide} bias {bool(bias)}",
        F.linear,
        values(rng, *shape),
        range(len(shape)),
        [values(rng, wide, shape[-1]), *bias],
    )


def matmul(rng: random.Random) -> Drawn:
    left = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    columns = rng.randint(1, 5)
    right = [*left[:-2], left[-1], columns] if rng.random() < 0.6 else [left[-1], columns]
    if rng.random() < 0.15:
        right = [left[-1]]
    return Drawn(
        f"matmul with plain {right}",
        torch.matmul,
        values(rng, *left),
        range(len(left)),
        [values(rng, *right)],
    )
