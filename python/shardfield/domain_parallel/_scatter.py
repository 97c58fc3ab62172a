"""Making sharded tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from shardfield._core import core
from shardfield._mesh import Cuts, core_mesh, normalized, rule_cuts

_MAX_DIMS = 16
_DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.complex128,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
]


def _shape_record(t: torch.Tensor) -> list[int]:
    """dtype, number of dims and sizes as numbers of a fixed count, for one small exchange."""
    sizes = list(t.shape) + [-1] * (_MAX_DIMS - t.dim())
    return [_DTYPES.index(t.dtype), t.dim(), *sizes]


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
    header = torch.full((_MAX_DIMS + 2,), -2, dtype=torch.int64)
    if (
        is_source
        and isinstance(tensor, torch.Tensor)
        and tensor.dtype in _DTYPES
        and tensor.dim() <= _MAX_DIMS
    ):
        header = torch.tensor(_shape_record(tensor), dtype=torch.int64)
    header = header.to(mesh.device_type)
    core.broadcast_(header, mesh_core, source)
    record = header.tolist()
    if record[0] < 0:
        raise ValueError(
            f"scatter_tensor: rank {src} (src) must pass the full tensor; other ranks pass None"
        )
    found_dtype, shape = _DTYPES[record[0]], record[2 : 2 + record[1]]
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


def from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: str | dict[int, Sequence[Sequence[int]]] = "infer",
    global_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Makes one tensor of the pieces that the ranks hold. See ShardTensor.from_local."""
    if device_mesh is None:
        raise ValueError("from_local: device_mesh is required")
    placed = normalized(placements, device_mesh, local_tensor.dim(), "from_local")
    mesh = core_mesh(device_mesh)
    partial = [a for a, p in enumerate(placed) if isinstance(p, Partial)]
    if partial:
        kinds = {placed[a].reduce_op for a in partial}  # type: ignore[attr-defined]
        if not kinds <= {"sum", "avg"} or len(kinds) > 1:
            raise ValueError(f"from_local: Partial can be sum or avg, got {sorted(kinds)}")
        local_tensor = core.reduce_sum(local_tensor, mesh, partial)
        if kinds == {"avg"}:
            count = 1
            for a in partial:
                count *= mesh.shape[a]
            local_tensor = local_tensor / count
        placed = [Replicate() if isinstance(p, Partial) else p for p in placed]
    if not any(isinstance(p, Shard) for p in placed):
        return local_tensor
    if isinstance(sharding_shapes, dict):
        cuts, shape = _cuts_from_shapes(local_tensor, mesh, placed, sharding_shapes, global_shape)
    elif sharding_shapes in ("chunk", "blockwise"):
        if global_shape is None:
            raise ValueError(f"from_local: sharding_shapes={sharding_shapes!r} needs global_shape")
        shape = list(global_shape)
        cuts = rule_cuts(placed, shape, mesh.shape, sharding_shapes)
    elif sharding_shapes == "infer":
        cuts, shape = _infer_cuts(local_tensor, mesh, placed, global_shape, device_mesh.device_type)
    else:
        raise ValueError(
            f"from_local: sharding_shapes must be 'infer', 'chunk', 'blockwise' or a dict, got {sharding_shapes!r}"
        )
    expected = _own_shape(cuts, shape, mesh)
    if list(local_tensor.shape) != expected:
        raise ValueError(
            f"from_local: rank {mesh.rank} holds a piece of shape {list(local_tensor.shape)}, but these piece "
            f"sizes give it {expected} of {shape}; pass the real piece shapes or sharding_shapes='infer'"
        )
    return core.wrap(local_tensor, mesh, cuts, shape, _is_channels_last(local_tensor))


def _is_channels_last(t: torch.Tensor) -> bool:
    # From what every rank sees alike only when no size is 1: such pieces fit both formats.
    if t.dim() not in (4, 5) or t.numel() == 0 or t.is_contiguous():
        return False
    return t.is_contiguous(
        memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    )


def _own_shape(cuts: Cuts, shape: Sequence[int], mesh: Any) -> list[int]:
    own = list(shape)
    for dim, axes, sizes in cuts:
        piece = 0
        for a in axes:
            piece = piece * mesh.shape[a] + mesh.coord[a]
        own[dim] = sizes[piece]
    return own


def _axes_by_dim(placed: Sequence[Placement]) -> dict[int, list[int]]:
    axes: dict[int, list[int]] = {}
    for a, p in enumerate(placed):
        if isinstance(p, Shard):
            axes.setdefault(p.dim, []).append(a)
    return axes


def _cuts_from_shapes(
    t: torch.Tensor,
    mesh: Any,
    placed: Sequence[Placement],
    shapes: dict[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> tuple[Cuts, list[int]]:
    cuts: Cuts = []
    shape = list(t.shape)
    for dim, axes in _axes_by_dim(placed).items():
        if len(axes) > 1:
            raise ValueError(
                f"from_local: mesh axes {axes} both cut dim {dim}; use sharding_shapes='infer'"
            )
        (axis,) = axes
        pieces = shapes.get(axis)
        if pieces is None or len(pieces) != mesh.shape[axis]:
            raise ValueError(
                f"from_local: sharding_shapes[{axis}] must list the piece shapes of the {mesh.shape[axis]} ranks "
                f"on that mesh axis, got {pieces}"
            )
        sizes = [int(p[dim]) if isinstance(p, (Sequence, torch.Size)) else int(p) for p in pieces]
        if min(sizes) < 0:
            raise ValueError(f"from_local: piece sizes must not be negative, got {sizes}")
        shape[dim] = sum(sizes)
        cuts.append((dim, [axis], sizes))
    if global_shape is not None and list(global_shape) != shape:
        raise ValueError(
            f"from_local: the pieces add up to {shape}, global_shape says {list(global_shape)}"
        )
    return cuts, shape


def _infer_cuts(
    t: torch.Tensor,
    mesh: Any,
    placed: Sequence[Placement],
    global_shape: Sequence[int] | None,
    device: str,
) -> tuple[Cuts, list[int]]:
    """Piece sizes by one small exchange. Every rank sees the same table, so all raise together."""
    table = core.all_gather_ints(_shape_record(t), mesh, torch.device(device))
    lines = "\n".join(
        f"  rank {r}: {row[2 : 2 + row[1]]} {_DTYPES[row[0]]}" for r, row in enumerate(table)
    )
    if any(row[:2] != table[0][:2] for row in table):
        raise ValueError(f"from_local: the ranks disagree on dtype or number of dims:\n{lines}")
    ndim = table[0][1]
    by_dim = _axes_by_dim(placed)
    coords = [_coord(r, mesh.shape) for r in range(mesh.size())]
    cuts: Cuts = []
    shape = [row[2 + d] for d, row in ((d, table[0]) for d in range(ndim))]
    for dim in range(ndim):
        axes = by_dim.get(dim, [])
        pieces: dict[tuple[int, ...], int] = {}
        for r, row in enumerate(table):
            place = tuple(coords[r][a] for a in axes)
            if pieces.setdefault(place, row[2 + dim]) != row[2 + dim]:
                raise ValueError(
                    f"from_local: the pieces do not fit together on dim {dim} (placements {list(placed)}):\n{lines}"
                )
        if axes:
            sizes = [pieces[place] for place in sorted(pieces)]
            shape[dim] = sum(sizes)
            cuts.append((dim, axes, sizes))
    if global_shape is not None and list(global_shape) != shape:
        raise ValueError(
            f"from_local: the pieces add up to {shape}, global_shape says {list(global_shape)}:\n{lines}"
        )
    return cuts, shape


def _coord(rank: int, shape: Sequence[int]) -> list[int]:
    coord: list[int] = []
    for n in reversed(shape):
        coord.append(rank % n)
        rank //= n
    return coord[::-1]


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
