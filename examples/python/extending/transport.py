"""A kernel of one's own, opaque to PyTorch, with its gradient and a sharded rule.

The flux of Burgers' equation through the n - 1 faces between n rows (Rusanov 1961), in NumPy:

    flux_i = (u_i^2 + u_{i+1}^2) / 4 - speed / 2 (u_{i+1} - u_i)
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from shardfield.domain_parallel import ShardTensor, halo_exchange


@torch.library.custom_op("transport::flux", mutates_args=())
def flux(u: torch.Tensor, speed: float) -> torch.Tensor:
    """Flux through the faces between rows; u (rows, ...), result (max(rows - 1, 0), ...)."""
    a = u.cpu().numpy()
    left, right = a[:-1], a[1:]
    faces = (left**2 + right**2) / 4 - speed / 2 * (right - left)
    return torch.from_numpy(faces).to(u.device)


@torch.library.custom_op("transport::flux_backward", mutates_args=())
def flux_backward(grad: torch.Tensor, u: torch.Tensor, speed: float) -> torch.Tensor:
    """Gradient of the rows, given that of the faces."""
    a, g = u.cpu().numpy(), grad.cpu().numpy()
    out = np.zeros_like(a)
    out[:-1] += g * (a[:-1] + speed) / 2
    out[1:] += g * (a[1:] - speed) / 2
    return torch.from_numpy(out).to(u.device)


def _keep_flux(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.speed = inputs[1]


def _keep_backward(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.speed = inputs[2]


def _flux_gradient(ctx: Any, grad: torch.Tensor) -> Any:
    return flux_backward(grad, ctx.saved_tensors[0], ctx.speed), None


def _second_gradient(ctx: Any, v: torch.Tensor) -> Any:
    grad, u = ctx.saved_tensors
    to_grad = v[:-1] * (u[:-1] + ctx.speed) / 2 + v[1:] * (u[1:] - ctx.speed) / 2
    to_u = torch.zeros_like(u)
    to_u[:-1] += v[:-1] * grad / 2
    to_u[1:] += v[1:] * grad / 2
    return to_grad, to_u, None


flux.register_autograd(_flux_gradient, setup_context=_keep_flux)
flux_backward.register_autograd(_second_gradient, setup_context=_keep_backward)


def sharded_flux(op: Any, types: Any, args: Any, kwargs: Any) -> torch.Tensor:
    """The rule: a rank has the faces above its rows, for which it needs the next rank's first row.
    On pieces the op runs as it is, and its own gradient with it.
    """
    u, speed = args
    mesh, piece = u._spec.mesh, u.to_local()
    for dim, (axis,), sizes in u._spec.cuts:
        if dim == 0:
            piece = halo_exchange(piece, mesh, 0, (0, 1), axis=axis, sizes=sizes)
    return ShardTensor.from_local(op(piece, speed), mesh, u.placements)


def register() -> Any:
    """Gives the op its rule, from which its derivatives follow; `.remove()` takes it off."""
    return ShardTensor.register_dispatch_handler(torch.ops.transport.flux.default, sharded_flux)
