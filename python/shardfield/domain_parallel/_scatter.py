"""Making sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from shardfield._core import core
from shardfield._mesh import core_mesh, normalized, rule_cuts
from shardfield.domain_parallel._from_local import DTYPES, MAX_DIMS, refuse_dtensor, shape_record


def shard_tensor(
    tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]
) -> torch.Tensor:
    """Cuts a tensor that every rank of the mesh already holds (torch.chunk rule).

    Local. Differentiable: the gradient of `tensor` is plain and full on every rank.

    Args:
        tensor: the same values on every rank, any dtype, shape (...).
        mesh: the ranks to use.
        placements: Shard(dim) or Replicate() per mesh axis.

    Returns:
        A tensor of the same shape; sharded, or `tensor` itself when nothing is cut.

    Raises:
        ValueError: placements that do not fit the tensor or the mesh.
    """
    refuse_dtensor(tensor, "shard_tensor")
    placed = normalized(placements, mesh, tensor.dim(), "shard_tensor")
    cuts = rule_cuts(placed, tensor.shape, mesh.mesh.shape)
    return core.redistribute(tensor, core_mesh(mesh), cuts) if cuts else tensor


def scatter_tensor(
    tensor: torch.Tensor | None,
    src: int,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    global_shape: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> torch.Tensor:
    """Cuts a tensor that one rank holds; every rank is sent its own piece only.

    Collective over the mesh. The result is a leaf.

    Args:
        tensor: the full tensor on rank `src`; None (or anything) on the others.
        src: global rank that holds it, inside the mesh.
        mesh: the ranks to use.
        placements: Shard(dim) or Replicate() per mesh axis (torch.chunk rule).
        global_shape: not needed; checked on `src` when given.
        dtype: not needed; checked on `src` when given.
        requires_grad: whether the result records gradients.

    Returns:
        The sharded tensor; a plain copy when every placement is Replicate.

    Raises:
        ValueError: `src` outside the mesh, or a tensor that does not fit what was announced.
    """
    ranks = mesh.mesh.flatten().tolist()
    if not isinstance(src, int) or src not in ranks:
        raise ValueError(
            f"scatter_tensor: src must be a global rank of the mesh {ranks}, got {src!r}"
        )
    mesh_core = core_mesh(mesh)
    source = ranks.index(src)
    is_source = mesh_core.rank == source
    header = torch.full((MAX_DIMS + 2,), -2, dtype=torch.int64)
    if (
        is_source
        and isinstance(tensor, torch.Tensor)
        and not isinstance(tensor, DTensor)
        and tensor.dtype in DTYPES
        and tensor.dim() <= MAX_DIMS
    ):
        header = torch.tensor(shape_record(tensor), dtype=torch.int64)
    header = header.to(mesh.device_type)
    core.broadcast_(header, mesh_core, source)
    record = header.tolist()
    if record[0] < 0:
        raise ValueError(
            f"scatter_tensor: rank {src} (src) must pass the full plain tensor; other ranks pass None"
        )
    found_dtype, shape = DTYPES[record[0]], record[2 : 2 + record[1]]
    if (dtype is not None and dtype != found_dtype) or (
        global_shape is not None and list(global_shape) != shape
    ):
        raise ValueError(
            f"scatter_tensor: expected shape {list(global_shape or shape)} and dtype {dtype or found_dtype}, "
            f"rank {src} holds {shape} {found_dtype}"
        )
    placed = normalized(placements, mesh, len(shape), "scatter_tensor")
    cuts = rule_cuts(placed, shape, mesh.mesh.shape)
    full = tensor.detach() if is_source and tensor is not None else None
    if cuts:
        out = core.scatter_from(full, mesh_core, cuts, shape, found_dtype, source)
    else:
        out = (
            full.clone().contiguous()
            if full is not None
            else torch.empty(shape, dtype=found_dtype, device=mesh.device_type)
        )
        core.broadcast_(out, mesh_core, source)
    return out.requires_grad_(requires_grad) if requires_grad else out


def align_generators(mesh: DeviceMesh, source: int) -> None:
    """Gives every rank of the mesh the CPU generator state of one. Collective over the mesh."""
    state = torch.get_rng_state()
    on_device = state.to(mesh.device_type)
    core.broadcast_(on_device, core_mesh(mesh), source)
    torch.set_rng_state(on_device.cpu())
    if dist.is_available() and mesh.device_type == "cuda":
        cuda_state = torch.cuda.get_rng_state().to("cuda")
        core.broadcast_(cuda_state, core_mesh(mesh), source)
        torch.cuda.set_rng_state(cuda_state.cpu())
