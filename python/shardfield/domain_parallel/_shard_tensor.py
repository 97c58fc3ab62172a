"""ShardTensor: the names users type, on tensors whose type stays torch.Tensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement

from shardfield._core import core
from shardfield._mesh import core_mesh, device_mesh_of, normalized, placements_of, rule_cuts
from shardfield.domain_parallel import _dtensor, _handlers
from shardfield.domain_parallel._from_local import from_local


class ShardTensorSpec:
    """Mesh and placements of a sharded tensor."""

    def __init__(self, x: torch.Tensor) -> None:
        self._x_mesh = core.mesh_of(x)
        self.placements = placements_of(x)
        self.cuts = core.cuts(x)
        self.shape = x.shape

    @property
    def mesh(self) -> DeviceMesh:
        """The DeviceMesh the tensor lives on."""
        return device_mesh_of(self._x_mesh)

    device_mesh = mesh

    def sharding_shapes(self) -> dict[int, list[list[int]]]:
        """Piece shapes per rank along each mesh axis that cuts one dim alone."""
        shapes: dict[int, list[list[int]]] = {}
        for dim, axes, sizes in self.cuts:
            if len(axes) == 1:
                shapes[axes[0]] = [
                    [s if d == dim else n for d, n in enumerate(self.shape)] for s in sizes
                ]
        return shapes

    def __repr__(self) -> str:
        return f"ShardTensorSpec(mesh={self.mesh}, placements={self.placements}, cuts={self.cuts})"


class _ShardTensorType(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, torch.Tensor) and core.is_sharded(instance)


class ShardTensor(metaclass=_ShardTensorType):
    """A tensor whose elements live on several ranks.

    It is an ordinary torch.Tensor (`type(x) is torch.Tensor`) of global shape;
    `isinstance(x, ShardTensor)` tells the sharded ones. Make one with `scatter_tensor`,
    `shard_tensor` or `ShardTensor.from_local`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "ShardTensor cannot be constructed; use scatter_tensor, shard_tensor or ShardTensor.from_local"
        )

    @staticmethod
    def from_local(
        local_tensor: torch.Tensor,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        sharding_shapes: str | dict[int, Sequence[Sequence[int]]] = "infer",
        global_shape: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Makes one tensor of the pieces that the ranks hold.

        Differentiable: the gradient of `local_tensor` is this rank's piece of the gradient.

        Args:
            local_tensor: this rank's piece.
            device_mesh: the ranks.
            placements: per mesh axis. Only Replicate gives the plain tensor back; Partial is
                reduced at once and gives the plain sum.
            sharding_shapes: "infer" exchanges the shapes (one small collective, checked on all
                ranks); "chunk" and "blockwise" derive them from global_shape without
                communication; a dict {mesh axis: piece shape (or size) per rank} gives them.
            global_shape: needed by "chunk" and "blockwise", else checked when given.

        Returns:
            The sharded tensor, or a plain one when nothing is cut.

        Raises:
            ValueError: pieces that do not fit together, with the table of shapes.
        """
        return from_local(local_tensor, device_mesh, placements, sharding_shapes, global_shape)

    @staticmethod
    def from_dtensor(dtensor: torch.Tensor) -> torch.Tensor:
        """A DTensor's pieces as a sharded tensor on the same mesh.

        Local and without a copy: both share the pieces' memory (collective where a placement is
        Partial, which is reduced first). Differentiable, to any order.

        Args:
            dtensor: a DTensor of any placements.

        Returns:
            The sharded tensor, or the plain one when nothing is cut.

        Raises:
            TypeError: not a DTensor.
            ValueError: a local tensor that does not have the rows its placements say.
        """
        return _dtensor.from_dtensor(dtensor)

    @staticmethod
    def register_function_handler(
        func: Callable[..., Any], handler: Callable[..., Any]
    ) -> _handlers.HandlerHandle:
        """Calls `handler(func, types, args, kwargs)` instead of a Python function when an argument
        is sharded. The result's `remove()` takes the handler off again.
        """
        return _handlers.register_function_handler(func, handler)

    @staticmethod
    def register_dispatch_handler(op: Any, handler: Callable[..., Any]) -> _handlers.HandlerHandle:
        """Calls `handler(op, types, args, kwargs)` for an ATen or custom op overload in place of the
        library's rule, above autograd: what the handler does is differentiated. The result's
        `remove()` takes the handler off again.
        """
        return _handlers.register_dispatch_handler(op, handler)

    @staticmethod
    def register_named_function_handler(
        name: str, handler: Callable[..., Any]
    ) -> _handlers.HandlerHandle:
        """As register_dispatch_handler for "namespace::op.overload" or "namespace.op.overload"; the
        op may be defined later.
        """
        return _handlers.register_named_function_handler(name, handler)

    @staticmethod
    def patches_enabled() -> bool:
        """Sharded kernels are always on."""
        return True


def _to_local(
    x: torch.Tensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """This rank's piece. Local; differentiable; shares memory with the tensor.

    Args:
        grad_placements: the piece's gradient is taken as this rank's piece of the gradient;
            Partial on an axis says that the ranks' gradients are to be summed, which needs it to be
            an axis the tensor is not cut along.
    """
    del grad_placements
    return core.local(x)


def _full_tensor(
    x: torch.Tensor, *, grad_placements: Sequence[Placement] | None = None
) -> torch.Tensor:
    """All elements, plain, on every rank. Collective over the mesh; differentiable: the gradient is
    taken as equal on all ranks.
    """
    del grad_placements
    return core.gather(x)


def _redistribute(
    x: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    async_op: bool = False,
) -> torch.Tensor:
    """The same tensor cut otherwise (torch.chunk rule). Collective over the mesh; differentiable.

    A dim that stays cut by the same axes keeps its piece sizes. Only Replicate gives the plain
    tensor.
    """
    del async_op
    mesh = device_mesh_of(core.mesh_of(x)) if device_mesh is None else device_mesh
    placed = normalized(placements, mesh, x.dim(), "redistribute")
    if any(isinstance(p, Partial) for p in placed):
        raise ValueError("redistribute: a tensor cannot become Partial; use Shard or Replicate")
    kept = {
        (dim, tuple(axes)): sizes for dim, axes, sizes in core.cuts(x) if sum(sizes) == x.shape[dim]
    }
    cuts = [
        (dim, axes, kept.get((dim, tuple(axes)), sizes))
        for dim, axes, sizes in rule_cuts(placed, x.shape, mesh.mesh.shape)
    ]
    return core.redistribute(x, core_mesh(mesh), cuts)


def _offsets(x: torch.Tensor, mesh_dim: int | None = None) -> Any:
    """Global index where this rank's piece begins, per tensor dim, or along one mesh axis."""
    offsets = core.offsets(x)
    if mesh_dim is None:
        return tuple(offsets)
    return next((offsets[dim] for dim, axes, _ in core.cuts(x) if mesh_dim in axes), 0)


class _OnSharded:
    """An attribute that exists on sharded tensors only: hasattr is False on plain ones."""

    def __init__(self, name: str, get: Callable[[torch.Tensor], Any]) -> None:
        self._name = name
        self._get = get
        # torch.overrides (torch.fx calls it) reads __set__ of every attribute of Tensor. On the
        # instance it makes no data descriptor: a plain tensor may still carry such a name.
        self.__set__ = self._refuse

    def _refuse(self, x: torch.Tensor, value: Any) -> None:
        raise AttributeError(f"'{self._name}' of a sharded tensor cannot be set")

    def __get__(self, x: torch.Tensor | None, owner: type | None = None) -> Any:
        if x is None:
            return self
        if not core.is_sharded(x):
            raise AttributeError(f"'{type(x).__name__}' object has no attribute '{self._name}'")
        return self._get(x)


def _method(f: Callable[..., Any]) -> Callable[[torch.Tensor], Any]:
    return lambda x: f.__get__(x)


def install() -> None:
    """Puts the attributes on torch.Tensor; done once at import."""
    attributes: dict[str, Callable[[torch.Tensor], Any]] = {
        "placements": placements_of,
        "device_mesh": lambda x: device_mesh_of(core.mesh_of(x)),
        "_spec": ShardTensorSpec,
        "_local_tensor": lambda x: core.local(x.detach()),
        "to_local": _method(_to_local),
        "full_tensor": _method(_full_tensor),
        "redistribute": _method(_redistribute),
        "to_dtensor": _method(_dtensor.to_dtensor),
        "offsets": _method(_offsets),
    }
    for name, get in attributes.items():
        setattr(torch.Tensor, name, _OnSharded(name, get))


install()
