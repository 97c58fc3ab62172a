"""Between DTensor and ShardTensor: conversion without a copy, and calls that mix the two.

In a call that mixes them a DTensor stands for its full value, as a weight that FSDP2 or tensor
parallelism holds in shards over another mesh axis. Its gradient is a DTensor in the same shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

from shardfield._core import core
from shardfield._mesh import core_mesh, device_mesh_of, normalized, placements_of, rule_cuts
from shardfield.domain_parallel._from_local import is_channels_last, own_shape


def _refuse_device_order(dtensor: DTensor) -> None:
    """Axes that cut one dim in another order than they have in the mesh, noted outside of the
    placements (a private feature of newer releases).
    """
    for entry in getattr(dtensor._spec, "shard_order", None) or ():
        if list(entry.mesh_dims) != sorted(entry.mesh_dims):
            raise ValueError(
                f"from_dtensor: expected mesh axes in mesh order, got {tuple(entry.mesh_dims)} on dim {entry.tensor_dim} "
                f"on rank {dist.get_rank()}; redistribute the DTensor to Shard placements in mesh order"
            )


def from_dtensor(dtensor: torch.Tensor) -> torch.Tensor:
    """The same pieces as a sharded tensor. See ShardTensor.from_dtensor."""
    if not isinstance(dtensor, DTensor):
        raise TypeError(f"from_dtensor: expected a DTensor, got {type(dtensor).__name__}")
    if any(isinstance(p, Partial) for p in dtensor.placements):
        reduced = [Replicate() if isinstance(p, Partial) else p for p in dtensor.placements]
        dtensor = dtensor.redistribute(placements=reduced)
    _refuse_device_order(dtensor)
    mesh = core_mesh(dtensor.device_mesh)
    placed = normalized(dtensor.placements, dtensor.device_mesh, dtensor.dim(), "from_dtensor")
    cuts = rule_cuts(placed, dtensor.shape, mesh.shape)
    piece = dtensor.to_local()
    if not cuts:
        return piece
    expected = own_shape(cuts, dtensor.shape, mesh)
    if list(piece.shape) != expected:
        raise ValueError(
            f"from_dtensor: expected a local tensor of {expected}, as DTensor divides {list(dtensor.shape)} by "
            f"{list(placed)}, got {list(piece.shape)} on rank {dist.get_rank()}; pass the pieces themselves: "
            "ShardTensor.from_local(x.to_local(), mesh, placements)"
        )
    return core.wrap(piece, mesh, cuts, list(dtensor.shape), is_channels_last(dtensor))


class _ToDTensor(torch.autograd.Function):
    """A piece becomes the local tensor of a DTensor; they share memory."""

    @staticmethod
    def forward(
        ctx: Any,
        piece: torch.Tensor,
        mesh: Any,
        placements: Sequence[Placement],
        shape: torch.Size,
        stride: tuple[int, ...],
    ) -> torch.Tensor:
        ctx.mesh, ctx.placements = mesh, placements
        return DTensor.from_local(
            piece.view_as(piece), mesh, placements, run_check=False, shape=shape, stride=stride
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        # Both are differentiable, whatever placements the gradient comes in.
        grad = grads[0].redistribute(ctx.mesh, ctx.placements).to_local()
        return grad, None, None, None, None


def to_dtensor(x: torch.Tensor, *, move: bool = False) -> torch.Tensor:
    """This tensor as a DTensor on the same mesh.

    Local and without a copy: both share the pieces' memory. Differentiable, to any order.

    Args:
        move: move rows where the pieces do not end at DTensor's borders (collective, a copy); False
            refuses such pieces.

    Returns:
        A DTensor with the same mesh and placements.

    Raises:
        ValueError: DTensor has no form for these pieces. It knows one division only:
            ceil(n / ranks) rows each until none are left.
    """
    mesh, placements = core.mesh_of(x), placements_of(x)
    cuts = [(dim, list(axes), list(sizes)) for dim, axes, sizes in core.cuts(x)]
    ruled = [
        (dim, list(axes), list(sizes))
        for dim, axes, sizes in rule_cuts(placements, x.shape, mesh.shape)
    ]
    if sorted(cuts) != sorted(ruled):
        if not move:
            held = {dim: sizes for dim, _, sizes in cuts}
            rule = {dim: sizes for dim, _, sizes in ruled}
            raise ValueError(
                f"to_dtensor: expected pieces of {rule} rows ({{dim: rows of each piece}}), the only division that "
                f"DTensor knows for {tuple(x.shape)}, got {held} on rank {dist.get_rank()}; "
                "to_dtensor(move=True) moves the rows"
            )
        x = core.redistribute(x, mesh, ruled)
    return _ToDTensor.apply(
        core.local(x), device_mesh_of(mesh), placements, x.shape, tuple(x.stride())
    )


# ---- Calls that mix both ------------------------------------------------------------------------

# They name tensors of the graph instead of using their values.
_BACKWARD = (torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward)


class _Mean(torch.autograd.Function):
    """The mean over the ranks of a mesh. Every rank has its own loss and the loss that counts is
    their mean, so the adjoint is the mean again.
    """

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: Any) -> torch.Tensor:
        ctx.mesh = mesh
        return core.reduce_sum(value, mesh, list(range(len(mesh.shape)))) / mesh.size()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Mean.apply(grads[0], ctx.mesh), None


class _MeanGradient(torch.autograd.Function):
    """The value itself; its gradient is averaged over the ranks of a mesh."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, mesh: Any) -> torch.Tensor:
        ctx.mesh = mesh
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _Mean.apply(grads[0], ctx.mesh), None


def _full_value(dtensor: DTensor, domain: set[int]) -> torch.Tensor:
    """All of a DTensor, plain. Collective over its mesh. On ranks of the sharded tensor's own mesh
    (`domain`) gradients are equal already; the others may hold other samples, and get the mean.
    """
    held = from_dtensor(dtensor)
    whole = core.gather(held) if core.is_sharded(held) else held
    if not whole.requires_grad or domain.issuperset(dtensor.device_mesh.mesh.flatten().tolist()):
        return whole
    return _MeanGradient.apply(whole, core_mesh(dtensor.device_mesh))


def _writes_first(name: str) -> bool:
    if name in ("__set__", "__setitem__", "set_", "copy_"):
        return True
    if name.startswith("__"):
        return name.startswith("__i") and name not in ("__invert__", "__index__", "__int__")
    return name.endswith("_")


def _refuse_writing(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    written = [kwargs.get("out")]
    if _writes_first(name) and args:
        written.append(args[0])
    if not any(isinstance(t, DTensor) for t in tree_leaves(written)):
        return
    cure = "convert one of them first: x.to_dtensor() or ShardTensor.from_dtensor(d)"
    if name.startswith("_foreach"):
        cure = "pass foreach=False and fused=False to the optimizer, or clip the two kinds apart"
    raise RuntimeError(
        f"{name}: expected tensors of one kind, got DTensors to write into beside sharded tensors on rank "
        f"{dist.get_rank()}; {cure}"
    )


def _mixed_call(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], sharded: torch.Tensor
) -> Any:
    _refuse_writing(getattr(func, "__name__", str(func)), args, kwargs)
    domain = set(device_mesh_of(core.mesh_of(sharded)).mesh.flatten().tolist())
    made: dict[int, torch.Tensor] = {}

    def full_value(d: DTensor) -> torch.Tensor:
        if id(d) not in made:
            made[id(d)] = _full_value(d, domain)
        return made[id(d)]

    args, kwargs = tree_map_only(DTensor, full_value, (args, kwargs))
    return func(*args, **kwargs)


def _torch_function(
    cls: Any,
    func: Callable[..., Any],
    types: Any,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
) -> Any:
    """DTensor's calls, with sharded tensors allowed among the arguments."""
    del cls, types
    kwargs = kwargs or {}
    alone = len(args) == 1 and not kwargs and isinstance(args[0], torch.Tensor)  # most: attributes
    if not alone and func not in _BACKWARD and not torch.compiler.is_compiling():
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor) and core.is_sharded(leaf):
                return _mixed_call(func, args, kwargs, leaf)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _refusing_sharded(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of DTensors that does not take a sharded tensor for a rank's plain one."""

    @functools.wraps(stock)
    def make(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if core.is_sharded(tensor):
            raise RuntimeError(
                f"{name}: expected a plain tensor, got {core.describe(tensor)} on rank {dist.get_rank()}; use "
                "x.to_dtensor() for the same pieces. A module that meets sharded inputs keeps its DTensor "
                "parameters (distribute_module) but cannot have hooks that make inputs DTensors (parallelize_module)"
            )
        return stock(tensor, *args, **kwargs)

    return make


def install() -> None:
    """Lets DTensors meet sharded tensors; done once at import."""
    DTensor.__torch_function__ = classmethod(_torch_function)  # type: ignore[assignment]
    from_local = _refusing_sharded("DTensor.from_local", DTensor.from_local)
    DTensor.from_local = staticmethod(from_local)  # type: ignore[assignment]
    distribute = _refusing_sharded("distribute_tensor", torch.distributed.tensor.distribute_tensor)
    for module in (torch.distributed.tensor, torch.distributed.tensor._api):
        module.distribute_tensor = distribute  # type: ignore[attr-defined]


install()
