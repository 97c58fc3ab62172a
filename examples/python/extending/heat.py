"""A Python function taught to run on pieces: the Laplacian of a periodic plate.

The function reads its windows straight from memory (as_strided), which a sharded tensor has none of:
as it is, it is refused. The handler gives it the piece with one row of the neighbours on every side.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from shardfield.domain_parallel import ShardTensor, halo_exchange

WEIGHTS = torch.tensor([[0.25, 0.5, 0.25], [0.5, -3.0, 0.5], [0.25, 0.5, 0.25]])


def nine_points(wide: torch.Tensor) -> torch.Tensor:
    """The 9-point stencil; wide (rows + 2, columns + 2), result (rows, columns), spacing 1."""
    rows, columns = wide.shape[0] - 2, wide.shape[1] - 2
    windows = wide.as_strided((rows, columns, 3, 3), wide.stride() * 2)
    return (windows * WEIGHTS.to(wide)).sum((2, 3))


def laplacian(u: torch.Tensor) -> torch.Tensor:
    """The Laplacian of a periodic plate (rows, columns)."""
    return nine_points(F.pad(u[None], (1, 1, 1, 1), mode="circular")[0])


def warmed(u: torch.Tensor, steps: int = 3) -> torch.Tensor:
    """The plate after explicit steps of the heat equation; warm parts conduct better."""
    for _ in range(steps):
        u = u + 0.1 * laplacian(u + 0.2 * u**3)
    return u


def sharded_laplacian(func: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The handler: the same stencil on this rank's piece and the rows around it."""
    (u,) = args
    mesh, cuts = u._spec.mesh, u._spec.cuts
    wide = u.to_local()
    is_empty = wide.numel() == 0
    for dim, (axis,), sizes in cuts:
        wide = halo_exchange(wide, mesh, dim, 1, axis=axis, mode="circular", sizes=sizes)
    for dim in {0, 1} - {dim for dim, _, _ in cuts}:  # every rank holds all of it
        n = wide.shape[dim]
        wide = torch.cat([wide.narrow(dim, n - 1, 1), wide, wide.narrow(dim, 0, 1)], dim)
    # A rank without rows takes part in every exchange of backward: a slice keeps it in the graph,
    # which as_strided of nothing does not.
    out = wide[1:-1, 1:-1] if is_empty else nine_points(wide)
    known = {axis: sizes for _, (axis,), sizes in cuts}
    return ShardTensor.from_local(out, mesh, u.placements, sharding_shapes=known)


def register() -> Any:
    """Calls the handler wherever `heat.laplacian` meets a sharded tensor; `.remove()` ends it."""
    return ShardTensor.register_function_handler(laplacian, sharded_laplacian)
