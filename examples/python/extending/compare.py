"""The three examples on the ranks of a launcher, compared with one device.

torchrun --nproc-per-node 3 examples/python/extending/compare.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import heat
import spectral
import torch
import torch.distributed as dist
import transport
from shardfield.domain_parallel import shard_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardfield

FIELDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heat, a Python function": heat.warmed,
    "transport, a kernel of one's own": lambda u: transport.flux(u, 0.8),
    "spectral, an op of ATen": spectral.smoothed,
}


def register() -> Sequence[Any]:
    """All three rules; `.remove()` of each takes it off."""
    return [heat.register(), transport.register(), *spectral.register()]


def derivatives(
    field: Callable[[torch.Tensor], torch.Tensor], u: torch.Tensor
) -> list[torch.Tensor]:
    """Value, gradient of a loss, and gradient of the squared gradient."""
    u = u.detach().requires_grad_()
    value = field(u)
    (first,) = torch.autograd.grad((value**3).sum(), u, create_graph=True)
    (second,) = torch.autograd.grad((first**2).sum(), u)
    return [value.detach(), first.detach(), second]


def main() -> None:
    """Prints the largest relative difference of each example, on rank 0."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    u = torch.sin(torch.arange(23 * 16, dtype=torch.float64).reshape(23, 16) * 0.7)
    serial = {name: derivatives(field, u) for name, field in FIELDS.items()}
    register()
    for name, field in FIELDS.items():
        with shardfield.report() as report:
            ours = derivatives(field, shard_tensor(u, mesh, [Shard(0)]))
        pairs = [(a.full_tensor(), b) for a, b in zip(ours, serial[name], strict=True)]
        worst = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
        if worst > 1e-12 or report.fallbacks:
            raise SystemExit(f"{name}: differs by {worst:.1e}, gathered {report.fallbacks}")
        if dist.get_rank() == 0:
            print(f"{name}: value and two derivatives within {worst:.1e}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
