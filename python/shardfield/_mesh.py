"""From torch's DeviceMesh and placements to the library's mesh and cuts, and back."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import (
    Partial,
    Placement,
    Replicate,
    Shard,
    _StridedShard,
)

from shardfield._core import core

Cuts = list[tuple[int, list[int], list[int]]]

_meshes: dict[tuple[Any, ...], Any] = {}
_device_meshes: dict[int, DeviceMesh] = {}


def _whole_group(mesh: DeviceMesh) -> dist.ProcessGroup:
    """The group over all ranks of a mesh, in row-major order."""
    if mesh.ndim == 1:
        return mesh.get_group(0)
    ranks = mesh.mesh.flatten().tolist()
    if ranks == list(range(dist.get_world_size())):
        return dist.distributed_c10d._get_default_group()
    return mesh._flatten().get_group(0)


def core_mesh(mesh: DeviceMesh) -> Any:
    """The library's mesh for a DeviceMesh; made at first use (collective then for submeshes of
    several axes, which need a group of their own).
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: expected a torch DeviceMesh, got {type(mesh).__name__}")
    if mesh.get_coordinate() is None:
        raise RuntimeError(
            f"mesh: rank {dist.get_rank()} is not in the mesh {mesh.mesh.tolist()}; "
            "call this on the mesh's ranks only"
        )
    groups = [mesh.get_group(a) for a in range(mesh.ndim)]
    names = tuple(mesh.mesh_dim_names or ())
    key = (
        tuple(mesh.mesh.flatten().tolist()),
        tuple(mesh.mesh.shape),
        names,
        mesh.device_type,
        tuple(g.group_name for g in groups),
        id(dist.distributed_c10d._get_default_group()),
    )
    found = _meshes.get(key)
    if found is not None:
        return found
    _forget_destroyed()
    mesh_rank = mesh.mesh.flatten().tolist().index(dist.get_rank())
    made = core.make_mesh(
        list(mesh.mesh.shape), list(names), mesh_rank, _whole_group(mesh), groups, mesh.device_type
    )
    _meshes[key] = made
    _device_meshes[made.id] = mesh
    return made


def _forget_destroyed() -> None:
    """Lets go of meshes whose groups were destroyed: a DeviceMesh keeps their threads and sockets."""
    alive = set(dist.distributed_c10d._world.pg_names.values())
    for key, mesh in list(_meshes.items()):
        if not alive.issuperset(key[4]):
            del _meshes[key]
            del _device_meshes[mesh.id]


def device_mesh_of(mesh: Any) -> DeviceMesh:
    """The DeviceMesh a library mesh was made from.

    Raises:
        RuntimeError: when its process groups were destroyed.
    """
    if mesh.id not in _device_meshes:
        raise RuntimeError(
            f"device_mesh: the process groups of the mesh {list(mesh.shape)} were destroyed; make the tensor "
            "anew on a mesh of living groups"
        )
    return _device_meshes[mesh.id]


def normalized(
    placements: Sequence[Placement] | None, mesh: DeviceMesh, ndim: int, op: str
) -> list[Placement]:
    """One placement per mesh axis with non-negative dims.

    Raises:
        ValueError: wrong number of placements, or a dim the tensor does not have.
    """
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    placements = [placements] if isinstance(placements, Placement) else list(placements)
    if len(placements) != mesh.ndim:
        raise ValueError(
            f"{op}: expected {mesh.ndim} placements (one per mesh axis), got {len(placements)}: {placements}"
        )
    out: list[Placement] = []
    for p in placements:
        if isinstance(p, (Shard, _StridedShard)):
            if not -ndim <= p.dim < ndim:
                raise ValueError(
                    f"{op}: placement {p} on a tensor of {ndim} dims; choose a dim in [{-ndim}, {ndim - 1}]"
                )
            dim = p.dim % ndim
            strided = isinstance(p, _StridedShard)
            p = _StridedShard(dim, split_factor=p.split_factor) if strided else Shard(dim)
        elif not isinstance(p, (Replicate, Partial)):
            raise ValueError(f"{op}: unknown placement {p}; use Shard, Replicate or Partial")
        out.append(p)
    return out


def axes_by_dim(placements: Sequence[Placement]) -> dict[int, list[int]]:
    """Mesh axes that cut each tensor dim, outermost first. As in DTensor a _StridedShard axis cuts
    what the Shard axes of its dim left.
    """
    axes: dict[int, list[int]] = {}
    for kind in (Shard, _StridedShard):
        for axis, p in enumerate(placements):
            if isinstance(p, kind):
                axes.setdefault(p.dim, []).append(axis)
    return dict(sorted(axes.items()))


def rule_cuts(
    placements: Sequence[Placement],
    shape: Sequence[int],
    mesh_shape: Sequence[int],
    rule: str = "chunk",
) -> Cuts:
    """Cuts by the torch.chunk or DTensor rule; two axes on one dim cut it twice."""
    sizes_of = core.chunk_sizes if rule == "chunk" else core.blockwise_sizes
    cuts: Cuts = []
    for dim, axes in axes_by_dim(placements).items():
        sizes = [shape[dim]]
        for axis in axes:
            sizes = [part for s in sizes for part in sizes_of(s, mesh_shape[axis])]
        cuts.append((dim, axes, sizes))
    return cuts


def placements_of(x: torch.Tensor) -> tuple[Placement, ...]:
    """Shard or Replicate per mesh axis of a sharded tensor."""
    placements: list[Placement] = [Replicate()] * len(core.mesh_of(x).shape)
    shape = core.mesh_of(x).shape
    for dim, axes, _ in core.cuts(x):
        for i, axis in enumerate(axes):
            # Cut after an axis that stands further right in the mesh: DTensor calls that strided.
            outer = [shape[a] for a in axes[:i] if a > axis]
            placements[axis] = _StridedShard(dim, split_factor=prod(outer)) if outer else Shard(dim)
    return tuple(placements)
