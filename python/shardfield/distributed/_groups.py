"""From torch's process groups to the library's one-axis meshes."""

from __future__ import annotations

import weakref
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardfield._core import core
from shardfield._mesh import _whole_group

Group: TypeAlias = "dist.ProcessGroup | DeviceMesh | str | None"

_meshes: weakref.WeakKeyDictionary[Any, dict[str, Any]] = weakref.WeakKeyDictionary()


def process_group(group: Group, op: str) -> dist.ProcessGroup:
    """The process group that a group, a mesh (all its ranks), a name of the DistributedManager or
    None (all ranks) stands for.

    Raises:
        RuntimeError: no group yet, or this rank is not in it.
    """
    if isinstance(group, str):
        from shardfield.distributed._manager import DistributedManager

        return DistributedManager().group(group)
    if not dist.is_initialized():
        raise RuntimeError(
            f"{op}: there is no process group; call DistributedManager.initialize() or "
            "torch.distributed.init_process_group() first"
        )
    if isinstance(group, DeviceMesh):
        return _whole_group(group)
    found = dist.distributed_c10d._get_default_group() if group is None else group
    if not isinstance(found, dist.ProcessGroup) or dist.get_rank(found) < 0:
        raise RuntimeError(
            f"{op}: rank {dist.get_rank()} is not in the group; call this on its ranks only"
        )
    return found


def group_mesh(group: Group, device: torch.device, op: str) -> Any:
    """The library's mesh over the ranks of a group, for tensors of this device. Local."""
    found = process_group(group, op)
    made = _meshes.setdefault(found, {})
    if device.type not in made:
        made[device.type] = core.make_mesh(
            [found.size()], ["group"], found.rank(), found, [found], device.type
        )
    return made[device.type]


def default_device(group: Group, op: str) -> torch.device:
    """Where a rank without a tensor of its own receives: the accelerator if the group serves it."""
    found = process_group(group, op)
    if torch.cuda.is_available() and torch.device("cuda") in found._device_types:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
