"""One tensor of the pieces that the ranks hold."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate

from shardfield._core import core
from shardfield._mesh import Cuts, axes_by_dim, core_mesh, normalized, rule_cuts

MAX_DIMS = 16
DTYPES = [
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

ShardingShapes = str | dict[int, Sequence[Sequence[int]]]


def refuse_dtensor(value: Any, op: str) -> None:
    """A DTensor is no plain tensor: its pieces are elsewhere than its shape says."""
    if isinstance(value, DTensor):
        raise TypeError(
            f"{op}: expected a plain tensor, got a DTensor of {tuple(value.shape)}; use ShardTensor.from_dtensor(d) for "
            "the same pieces"
        )


def shape_record(t: torch.Tensor) -> list[int]:
    """dtype, number of dims and sizes as a fixed count of numbers for one small exchange; -1 where
    they cannot be told, so that all ranks learn of it.
    """
    dtype = DTYPES.index(t.dtype) if t.dtype in DTYPES else -1
    if t.dim() > MAX_DIMS:
        return [dtype, -1] + [-1] * MAX_DIMS
    return [dtype, t.dim(), *t.shape] + [-1] * (MAX_DIMS - t.dim())


def from_local(
    local_tensor: torch.Tensor,
    device_mesh: DeviceMesh | None = None,
    placements: Sequence[Placement] | None = None,
    sharding_shapes: ShardingShapes = "infer",
    global_shape: Sequence[int] | None = None,
) -> torch.Tensor:
    """Makes one tensor of the pieces that the ranks hold. See ShardTensor.from_local."""
    refuse_dtensor(local_tensor, "from_local")
    if device_mesh is None:
        raise ValueError("from_local: device_mesh is required")
    mesh = core_mesh(device_mesh)
    given = [placements] if isinstance(placements, Placement) else list(placements or [])
    table: list[list[int]] | None = None
    infers = sharding_shapes == "infer" or any(isinstance(p, Partial) for p in given)
    if infers and any(not isinstance(p, Replicate) for p in given):
        table = _exchange_records(local_tensor, mesh, given, device_mesh.device_type)
    placed = normalized(placements, device_mesh, local_tensor.dim(), "from_local")
    if table is not None:
        # Before any data moves: pieces that do not fit would hang or abort the reduction.
        inferred = _cuts_from_table(table, mesh, placed, global_shape)
    local_tensor = _reduce_partial(local_tensor, mesh, placed)
    if not axes_by_dim(placed):
        return local_tensor
    channels_last = False  # one memory order for all ranks; a rank alone cannot tell the others'
    if isinstance(sharding_shapes, dict):
        cuts, shape = _cuts_from_shapes(local_tensor, mesh, placed, sharding_shapes, global_shape)
    elif sharding_shapes in ("chunk", "blockwise"):
        if global_shape is None:
            raise ValueError(f"from_local: sharding_shapes={sharding_shapes!r} needs global_shape")
        shape = list(global_shape)
        if len(shape) != local_tensor.dim():
            raise ValueError(
                f"from_local: global_shape {shape} has {len(shape)} dims, the piece of rank {mesh.rank} "
                f"has {local_tensor.dim()}"
            )
        cuts = rule_cuts(placed, shape, mesh.shape, sharding_shapes)
    elif sharding_shapes == "infer":
        assert table is not None, "Shard placements always exchange records"
        cuts, shape = inferred
        # One memory order for the whole tensor: only what every rank reports counts.
        channels_last = all(bool(row[-1]) for row in table)
    else:
        raise ValueError(
            "from_local: sharding_shapes must be 'infer', 'chunk', 'blockwise' or a dict, "
            f"got {sharding_shapes!r}"
        )
    expected = own_shape(cuts, shape, mesh)
    if list(local_tensor.shape) != expected:
        raise ValueError(
            f"from_local: rank {mesh.rank} holds a piece of shape {list(local_tensor.shape)}, but these "
            f"piece sizes give it {expected} of {shape}; pass the real piece shapes or "
            "sharding_shapes='infer'"
        )
    return core.wrap(local_tensor, mesh, cuts, shape, channels_last)


def _placement_code(p: Placement) -> int:
    """Equal for equal placements, small enough for an int64 table."""
    return sum((i + 1) * ord(c) for i, c in enumerate(repr(p)))


def _exchange_records(
    t: torch.Tensor, mesh: Any, given: Sequence[Placement], device: str
) -> list[list[int]]:
    """Every rank's dtype, shape, placements and memory order; all ranks raise together when they
    cannot belong to one tensor. Collective over the mesh.
    """
    codes = [_placement_code(p) for p in given[: len(mesh.shape)]]
    codes += [-1] * (len(mesh.shape) - len(codes))
    record = [*shape_record(t), *codes, int(is_channels_last(t) or t.numel() == 0)]
    table = core.all_gather_ints(record, mesh, torch.device(device))
    lines = _table_text(table)
    if any(row[0] < 0 or row[1] < 0 for row in table):
        raise ValueError(f"from_local: a dtype or number of dims is not supported:\n{lines}")
    if any(row[:2] != table[0][:2] for row in table):
        raise ValueError(f"from_local: the ranks disagree on dtype or number of dims:\n{lines}")
    first = MAX_DIMS + 2
    if any(row[first:-1] != table[0][first:-1] for row in table):
        raise ValueError(
            f"from_local: the ranks pass different placements; rank {mesh.rank} passes {list(given)}; "
            f"pass the same on every rank:\n{lines}"
        )
    return table


def _table_text(table: list[list[int]]) -> str:
    return "\n".join(
        f"  rank {r}: {row[2 : 2 + row[1]]} {DTYPES[row[0]] if row[0] >= 0 else 'other dtype'}"
        for r, row in enumerate(table)
    )


def _reduce_partial(t: torch.Tensor, mesh: Any, placed: list[Placement]) -> torch.Tensor:
    """Sums over the axes marked Partial and marks them Replicate. Collective over those axes."""
    axes = [a for a, p in enumerate(placed) if isinstance(p, Partial)]
    if not axes:
        return t
    kinds = {p.reduce_op for p in placed if isinstance(p, Partial)}
    if kinds not in ({"sum"}, {"avg"}):
        raise ValueError(f"from_local: Partial can be sum or avg, got {sorted(kinds)}")
    for a in axes:
        placed[a] = Replicate()
    total = core.reduce_sum(t, mesh, axes)
    return total / prod(mesh.shape[a] for a in axes) if kinds == {"avg"} else total


def is_channels_last(t: torch.Tensor) -> bool:
    """Whether 4-D or 5-D memory is ordered with the channels fastest."""
    if t.dim() not in (4, 5) or t.numel() == 0 or t.is_contiguous():
        return False
    return t.is_contiguous(
        memory_format=torch.channels_last if t.dim() == 4 else torch.channels_last_3d
    )


def own_shape(cuts: Cuts, shape: Sequence[int], mesh: Any) -> list[int]:
    """Shape of this rank's piece of a tensor of this global shape."""
    own = list(shape)
    for dim, axes, sizes in cuts:
        piece = 0
        for a in axes:
            piece = piece * mesh.shape[a] + mesh.coord[a]
        own[dim] = sizes[piece]
    return own


def _cuts_from_shapes(
    t: torch.Tensor,
    mesh: Any,
    placed: Sequence[Placement],
    shapes: dict[int, Sequence[Sequence[int]]],
    global_shape: Sequence[int] | None,
) -> tuple[Cuts, list[int]]:
    cuts: Cuts = []
    shape = list(t.shape)
    unknown = [a for a in shapes if not 0 <= a < len(mesh.shape)]
    if unknown:
        raise ValueError(
            f"from_local: sharding_shapes names mesh axes {unknown}; the mesh has {len(mesh.shape)}"
        )
    for dim, axes in axes_by_dim(placed).items():
        if len(axes) > 1:
            raise ValueError(
                f"from_local: mesh axes {axes} both cut dim {dim}; use sharding_shapes='infer'"
            )
        (axis,) = axes
        sizes = _listed_sizes(t, mesh, dim, axis, shapes.get(axis))
        shape[dim] = sum(sizes)
        cuts.append((dim, [axis], sizes))
    if global_shape is not None and list(global_shape) != shape:
        raise ValueError(
            f"from_local: the pieces add up to {shape}, global_shape says {list(global_shape)}"
        )
    return cuts, shape


def _listed_sizes(
    t: torch.Tensor, mesh: Any, dim: int, axis: int, pieces: Sequence[Sequence[int]] | None
) -> list[int]:
    """Piece sizes on `dim` from the listed shapes (or plain sizes) along one mesh axis."""
    if pieces is None or len(pieces) != mesh.shape[axis]:
        raise ValueError(
            f"from_local: sharding_shapes[{axis}] must list the piece shapes of the {mesh.shape[axis]} "
            f"ranks on that mesh axis, got {pieces}"
        )
    sizes: list[int] = []
    for p in pieces:
        if isinstance(p, int):
            sizes.append(p)
            continue
        whole = list(p)
        same = len(whole) == t.dim() and all(
            n == m for d, (n, m) in enumerate(zip(whole, t.shape, strict=True)) if d != dim
        )
        if not same:
            raise ValueError(
                f"from_local: sharding_shapes[{axis}] lists a piece {whole}, which does not fit beside "
                f"the piece {list(t.shape)} of rank {mesh.rank} (they may differ on dim {dim} only)"
            )
        sizes.append(int(whole[dim]))
    if min(sizes) < 0:
        raise ValueError(f"from_local: piece sizes must not be negative, got {sizes}")
    return sizes


def _cuts_from_table(
    table: list[list[int]],
    mesh: Any,
    placed: Sequence[Placement],
    global_shape: Sequence[int] | None,
) -> tuple[Cuts, list[int]]:
    """Piece sizes from every rank's shape. Every rank sees the same table, so all raise together."""
    by_dim = axes_by_dim(placed)
    coords = [_coord(r, mesh.shape) for r in range(mesh.size())]
    cuts: Cuts = []
    shape = table[0][2 : 2 + table[0][1]]
    for dim in range(len(shape)):
        axes = by_dim.get(dim, [])
        pieces: dict[tuple[int, ...], int] = {}
        for r, row in enumerate(table):
            place = tuple(coords[r][a] for a in axes)
            if pieces.setdefault(place, row[2 + dim]) != row[2 + dim]:
                raise ValueError(
                    f"from_local: the pieces do not fit together on dim {dim} (placements "
                    f"{list(placed)}):\n{_table_text(table)}"
                )
        if axes:
            sizes = [pieces[place] for place in sorted(pieces)]
            shape[dim] = sum(sizes)
            cuts.append((dim, axes, sizes))
    if global_shape is not None and list(global_shape) != shape:
        raise ValueError(
            f"from_local: the pieces add up to {shape}, global_shape says {list(global_shape)}:\n"
            f"{_table_text(table)}"
        )
    return cuts, shape


def _coord(rank: int, shape: Sequence[int]) -> list[int]:
    coord: list[int] = []
    for n in reversed(shape):
        coord.append(rank % n)
        rank //= n
    return coord[::-1]
