"""Replicated modules: equal parameters, buffers and generators over a mesh."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardfield._core import core
from shardfield._mesh import core_mesh
from shardfield.domain_parallel._scatter import align_generators


def sync_module_over_mesh(
    module: torch.nn.Module, mesh: DeviceMesh, src_mesh_rank: int = 0, verify: bool = False
) -> torch.nn.Module:
    """Makes parameters, buffers and the random generator equal over a mesh.

    Collective over the mesh. Local values are overwritten by those of one mesh rank. Parameters
    that are DTensors or sharded are left alone. The generator state is aligned too, because plain
    tensors are replicated and their dropout must draw alike on every rank of the domain.

    Args:
        module: any module, the same structure on every rank.
        mesh: the domain mesh (or submesh); pass only the axes that share one sample.
        src_mesh_rank: whose values win.
        verify: compare instead of overwrite.

    Returns:
        The module.

    Raises:
        RuntimeError: with verify, naming the parameters and buffers that differ.
    """
    mesh_core = core_mesh(mesh)
    if not 0 <= src_mesh_rank < mesh_core.size():
        raise ValueError(
            f"sync_module_over_mesh: src_mesh_rank must be in [0, {mesh_core.size()}), got {src_mesh_rank}"
        )
    differing: list[str] = []
    with torch.no_grad():
        for name, value in [*module.named_parameters(), *module.named_buffers()]:
            if isinstance(value, DTensor) or core.is_sharded(value):
                continue
            source = value.detach().clone(memory_format=torch.contiguous_format)
            core.broadcast_(source, mesh_core, src_mesh_rank)
            if not verify:
                value.copy_(source)
                continue
            same = bool(torch.equal(source, value))
            flags = core.all_gather_ints([int(same)], mesh_core, torch.device(mesh.device_type))
            if not all(flag[0] for flag in flags):
                ranks = [r for r, flag in enumerate(flags) if not flag[0]]
                differing.append(f"{name} (mesh ranks {ranks})")
    if differing:
        raise RuntimeError(
            f"sync_module_over_mesh: differ from mesh rank {src_mesh_rank}: {', '.join(differing)}"
        )
    if not verify:
        align_generators(mesh, src_mesh_rank)
    return module
