"""Published cases, kind E: exchanges between neighbours, and their adjoints."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, arange, check_same_as_serial, full, numbers
from shardfield.domain_parallel import shard_tensor
from torch.distributed.tensor import Shard


def dot_test(mesh, function, x: torch.Tensor, placements, sizes=None) -> None:
    """<y, A x> == <A^T y, x> and A x equal to serial, for a linear A."""
    check_same_as_serial(
        function, [Cut(x, placements, {0: sizes} if sizes else {})], mesh, second=False
    )
    from oracle import scatter

    ours = scatter(Cut(x, placements, {0: sizes} if sizes else {}), mesh).requires_grad_()
    out = function(ours)
    y = numbers(*out.shape, seed=5)
    left = (out * y).sum()
    (adjoint,) = torch.autograd.grad(left, ours)
    right = (adjoint * x).sum()
    assert float(left) == pytest.approx(float(right), rel=1e-12)


def adjoints(mesh) -> None:
    x = arange(1, 1, 6) * 0 + 1
    ones = torch.ones(1, 1, 3, dtype=torch.float64)
    # Pieces of two with a halo of width 1 hold 3 + 4 + 3 = 10 ones; the adjoint counts copies.
    for width, ends in itertools.product((1, 2, 3), ("constant", "circular", "reflect")):
        w = numbers(1, 1, 2 * width + 1, seed=width)
        for sizes in ([2, 2, 2], [3, 0, 3], [0, 1, 5], [6, 0, 0]):
            dot_test(
                mesh,
                lambda t, w=w, n=width, ends=ends: F.conv1d(F.pad(t, (n, n), mode=ends), w),
                numbers(1, 1, 6),
                [Shard(2)],
                sizes,
            )
    t = shard_tensor(x, mesh, [Shard(2)]).requires_grad_()
    F.conv1d(t, ones, padding=1).sum().backward()
    assert full(t.grad).flatten().tolist() == [2, 3, 3, 3, 3, 2]
