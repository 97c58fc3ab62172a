"""A program written for one rank's pieces, called on whole tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from shardfield._core import core
from shardfield._mesh import core_mesh
from shardfield.domain_parallel._dtensor import from_dtensor
from shardfield.domain_parallel._from_local import from_local
from shardfield.domain_parallel._scatter import shard_tensor

Placements = Sequence[Placement]


class _Leave(torch.autograd.Function):
    """A value that is equal on `count` ranks becomes a plain one: each rank has its share of it."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, mesh: Any, axes: list[int], count: int
    ) -> torch.Tensor:
        ctx.mesh, ctx.axes, ctx.count = mesh, axes, count
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return core.enter(grads[0], ctx.mesh, ctx.axes) / ctx.count, None, None, None


def _axes_of(placements: Placements, kind: type[Placement]) -> list[int]:
    return [axis for axis, p in enumerate(placements) if isinstance(p, kind)]


def _piece(value: Any, placements: Placements | None, mesh: DeviceMesh) -> Any:
    if placements is None or not isinstance(value, torch.Tensor):
        return value
    if _axes_of(placements, Partial):
        raise ValueError("local_map: an input cannot be placed as Partial; pass Shard or Replicate")
    whole = _axes_of(placements, Replicate)
    if isinstance(value, DTensor):
        value = from_dtensor(value)
    if core.is_sharded(value):
        value = value.redistribute(mesh, list(placements))  # type: ignore[attr-defined]
    elif len(whole) < mesh.ndim:
        value = shard_tensor(value, mesh, list(placements))
    piece = core.local(value) if core.is_sharded(value) else value
    return core.enter(piece, core_mesh(mesh), whole)


def _joined(value: Any, placements: Placements | None, mesh: DeviceMesh) -> Any:
    if placements is None or not isinstance(value, torch.Tensor):
        return value
    whole = _axes_of(placements, Replicate)
    count = 1
    for axis in whole:
        count *= mesh.size(axis)
    if count > 1 and value.requires_grad:
        value = _Leave.apply(value, core_mesh(mesh), whole, count)
    return from_local(value, mesh, list(placements))


def local_map(
    fn: Callable[..., Any],
    in_placements: Sequence[Placements | None],
    out_placements: Sequence[Any],
    mesh: DeviceMesh,
) -> Callable[..., Any]:
    """Wraps a function of pieces so that it takes and gives whole tensors.

    Inside, tensors are this rank's pieces, plain torch tensors; `halo_exchange`, `ring_shift`,
    `all_reduce` and the collectives of `shardfield.distributed` may be called. Collective when an input has to be moved to its
    placement, and for the sizes of sharded outputs. Differentiable, to any order: the gradient of
    an input placed as Replicate is summed over the ranks.

    Args:
        fn: called with one piece per argument.
        in_placements: per positional argument one placement per mesh axis (Shard or Replicate), or
            None to pass it as it is. Arguments that are elsewhere are moved.
        out_placements: one placement per mesh axis for a function with one output, else such a list
            per output. Shard: pieces of any size, in rank order. Replicate: equal on those ranks.
            Partial: summed over them.
        mesh: the mesh that the placements speak of.

    Returns:
        The function of whole tensors.

    Raises:
        ValueError: counts of placements that do not fit the arguments, outputs or mesh axes.

    Example:
        >>> norms = local_map(
        ...     lambda x, w: (x @ w).square().sum(), [[Shard(0)], [Replicate()]], [Partial()], mesh
        ... )
        >>> norms(x, w)  # the plain sum over all rows
    """
    single = not out_placements or isinstance(out_placements[0], Placement)
    outs: list[Placements | None] = [out_placements] if single else list(out_placements)
    for placements in [*in_placements, *outs]:
        if placements is not None and len(placements) != mesh.ndim:
            raise ValueError(
                f"local_map: expected one placement per mesh axis ({mesh.ndim}), got {list(placements)}"
            )

    @functools.wraps(fn)
    def whole(*args: Any, **kwargs: Any) -> Any:
        if len(args) != len(in_placements):
            raise ValueError(
                f"local_map: {len(in_placements)} in_placements for {len(args)} positional arguments"
            )
        pieces = [_piece(a, p, mesh) for a, p in zip(args, in_placements, strict=True)]
        result = fn(*pieces, **kwargs)
        if single:
            return _joined(result, outs[0], mesh)
        if not isinstance(result, (tuple, list)) or len(result) != len(outs):
            count = len(result) if isinstance(result, (tuple, list)) else 1
            raise ValueError(f"local_map: {len(outs)} out_placements for {count} outputs")
        return type(result)([_joined(r, p, mesh) for r, p in zip(result, outs, strict=True)])

    return whole
