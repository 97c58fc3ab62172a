"""What a program for the pieces calls inside `local_map`: halo, ring and all-reduce.

Values are per-rank: every rank has its own tensor and its own loss, and the gradient is that of the
sum of all ranks' losses. Each function's backward is its adjoint, a function of this file again, so
any order of derivative works; every rank must run backward when one does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh

from shardfield._core import core
from shardfield._mesh import core_mesh
from shardfield.domain_parallel._from_local import shape_record

Axis = int | str | None
Segment = tuple[int, int, int]  # start, count, step

_MODES = ("open", "constant", "reflect", "replicate", "circular")


def _axis_of(axis: Axis, mesh: DeviceMesh, op: str) -> int:
    """Number of a mesh axis given by number or name; None is the only axis there is."""
    names = mesh.mesh_dim_names or ()
    if axis is None and mesh.ndim == 1:
        return 0
    if isinstance(axis, str) and axis in names:
        return names.index(axis)
    if isinstance(axis, int) and not isinstance(axis, bool) and -mesh.ndim <= axis < mesh.ndim:
        return axis % mesh.ndim
    raise ValueError(
        f"{op}: expected axis to be a mesh axis in [0, {mesh.ndim}) or one of {tuple(names)}, got {axis!r} on rank "
        f"{dist.get_rank()}; name the axis that cuts this dim"
    )


def _dim_of(dim: int, piece: torch.Tensor, op: str) -> int:
    if not -piece.dim() <= dim < piece.dim():
        raise ValueError(
            f"{op}: expected a dim of the piece of {piece.dim()} dims, got {dim} on rank {dist.get_rank()}"
        )
    return dim % piece.dim()


def _sizes_along(
    piece: torch.Tensor,
    mesh: DeviceMesh,
    axis: int,
    dim: int,
    sizes: Sequence[int] | None,
    op: str,
) -> list[int]:
    """Rows of each rank along the axis: as given, or asked of the ranks, which is collective over
    the mesh and raises on all of them when the pieces do not fit.
    """
    count = mesh.size(axis)
    if sizes is not None:
        known = [int(n) for n in sizes]
        mine = known[mesh.get_local_rank(axis)] if len(known) == count else -1
        if mine != piece.shape[dim] or min(known) < 0:
            raise ValueError(
                f"{op}: expected sizes to be the rows of the {count} ranks along mesh axis {axis}, this rank's "
                f"{piece.shape[dim]} among them, got {known} on rank {dist.get_rank()}; leave sizes out to have them asked"
            )
        return known
    whole = core_mesh(mesh)
    table = core.all_gather_ints(shape_record(piece), whole, torch.device(mesh.device_type))
    grid = torch.arange(whole.size(), device="cpu").reshape(mesh.mesh.shape).movedim(axis, -1)
    lines = grid.reshape(-1, count).tolist()
    for line in lines:
        others = [[n for i, n in enumerate(table[r]) if i != 2 + dim] for r in line]
        if any(row != others[0] or row[0] < 0 or row[1] < 0 for row in others):
            shapes = "\n".join(f"  mesh rank {r}: {table[r][2 : 2 + table[r][1]]}" for r in line)
            raise ValueError(
                f"{op}: expected pieces of one dtype that differ on dim {dim} only, got\n{shapes}\nalong mesh axis "
                f"{axis}, on rank {dist.get_rank()}"
            )
    (own,) = [line for line in lines if whole.rank in line]
    return [table[r][2 + dim] for r in own]


def _beyond(rows: range, total: int, mode: str) -> list[Segment]:
    """The rows that stand for rows outside [0, total)."""
    if mode in ("open", "constant"):
        return []
    if mode == "circular":
        return [(row % total, 1, 1) for row in rows]
    if mode == "replicate":
        return [(min(max(row, 0), total - 1), 1, 1) for row in rows]
    return [(-row if row < 0 else 2 * (total - 1) - row, 1, 1) for row in rows]


def _wanted(begin: int, end: int, total: int, mode: str) -> list[Segment]:
    """Segments of global rows [begin, end), which may reach over the ends of the domain."""
    first, last = min(max(begin, 0), total), min(max(end, 0), total)
    return [
        *_beyond(range(begin, min(end, 0)), total, mode),
        (first, max(last - first, 0), 1),
        *_beyond(range(max(begin, total), end), total, mode),
    ]


def _width_of(width: int | Sequence[int]) -> tuple[int, int]:
    low, high = (width, width) if isinstance(width, int) else tuple(width)
    if low < 0 or high < 0:
        raise ValueError(
            f"halo_exchange: expected a width of at least 0 rows per side, got {(low, high)} on rank {dist.get_rank()}"
        )
    return int(low), int(high)


def _check_mode(mode: str, total: int, low: int, high: int) -> None:
    if mode not in _MODES:
        raise ValueError(f"halo_exchange: expected mode to be one of {_MODES}, got {mode!r}")
    least = {"reflect": max(low, high) + 1, "replicate": 1, "circular": 1}.get(mode, 0)
    if (low or high) and total < least:
        raise ValueError(
            f"halo_exchange: mode {mode!r} with width {(low, high)} expected at least {least} rows in all, got {total} "
            f"on rank {dist.get_rank()}"
        )


def halo_exchange(
    piece: torch.Tensor,
    mesh: DeviceMesh,
    dim: int,
    width: int | Sequence[int] = 1,
    *,
    axis: Axis = None,
    mode: str = "open",
    value: float = 0.0,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """This rank's rows with `width` rows of its neighbours on each side (ghost cells).

    Collective over the mesh axis (over the mesh without `sizes`). Only halo rows travel, one
    message per pair of ranks; a halo wider than the neighbour's piece comes from the ranks behind
    it. Two split dims: exchange one, then the other, and the corners are right.

    Args:
        piece: this rank's rows along `dim`, any dtype, none at all is fine.
        mesh: the ranks.
        dim: the dim that the mesh axis cuts.
        width: halo rows, on both sides alike or (below, above).
        axis: number or name of the mesh axis; not needed on a mesh of one axis.
        mode: what lies beyond the ends of the domain. "open": nothing, so the first and last rank
            get fewer rows; "constant", "reflect", "replicate", "circular" (periodic): as in
            torch.nn.functional.pad.
        value: of mode "constant".
        sizes: rows of each rank along the axis, if known; else one small message asks for them.

    Returns:
        A tensor with `width[0] + rows + width[1]` rows along `dim`, in global order. Backward: halo
        gradients travel back and are added at their owners.

    Raises:
        ValueError: arguments that do not fit the piece or the mesh.

    Example:
        >>> # rows 0 1 2 on rank 0, rows 3 4 on rank 1
        >>> halo_exchange(piece, mesh, dim=0)  # 0 1 2 3 on rank 0, 2 3 4 on rank 1
    """
    op = "halo_exchange"
    low, high = _width_of(width)
    dim, axis = _dim_of(dim, piece, op), _axis_of(axis, mesh, op)
    rows = _sizes_along(piece, mesh, axis, dim, sizes, op)
    total = sum(rows)
    _check_mode(mode, total, low, high)
    starts = [sum(rows[:rank]) for rank in range(len(rows))]
    wanted = [
        _wanted(start - low, start + n + high, total, mode)
        for start, n in zip(starts, rows, strict=True)
    ]
    out = core.exchange_rows(piece, core_mesh(mesh), axis, dim, rows, wanted)
    if mode != "constant":
        return out
    start, n = starts[mesh.get_local_rank(axis)], piece.shape[dim]
    below = min(max(low - start, 0), low + n + high)
    above = low + n + high - below - out.shape[dim]
    return F.pad(out, [0, 0] * (piece.dim() - 1 - dim) + [below, above], value=value)


def ring_shift(
    piece: torch.Tensor,
    mesh: DeviceMesh,
    shift: int = 1,
    *,
    dim: int = 0,
    axis: Axis = None,
    sizes: Sequence[int] | None = None,
) -> torch.Tensor:
    """Every rank's tensor, `shift` ranks on round the ring of a mesh axis.

    Sends to rank + shift, returns what rank - shift sent. Collective over the mesh axis (over the
    mesh without `sizes`).

    Args:
        piece: this rank's tensor; the ranks' tensors may differ in length along `dim`.
        mesh: the ranks.
        shift: how far, negative for the other way.
        dim: the dim along which lengths may differ.
        axis: number or name of the mesh axis; not needed on a mesh of one axis.
        sizes: length of each rank's tensor along `dim`, if known; else one small message asks for
            them. After a shift they have moved too.

    Returns:
        The tensor of rank - shift. Backward: the gradient takes the opposite way.

    Raises:
        ValueError: arguments that do not fit the piece or the mesh.

    Example:
        >>> block = keys
        >>> for _ in range(mesh.size()):  # every rank sees every block
        ...     total = total + interaction(queries, block)
        ...     block = ring_shift(block, mesh)
    """
    op = "ring_shift"
    dim, axis = _dim_of(dim, piece, op), _axis_of(axis, mesh, op)
    rows = _sizes_along(piece, mesh, axis, dim, sizes, op)
    count = len(rows)
    sources = [(rank - shift) % count for rank in range(count)]
    wanted = [[(sum(rows[:source]), rows[source], 1)] for source in sources]
    return core.exchange_rows(piece, core_mesh(mesh), axis, dim, rows, wanted)


def all_reduce(
    tensor: torch.Tensor,
    mesh: DeviceMesh,
    op: str = "sum",
    *,
    axis: Axis | Sequence[int | str] = None,
) -> torch.Tensor:
    """The sum, mean, maximum or minimum of the ranks' tensors, on every rank.

    Collective over the mesh axes.

    Args:
        tensor: the same shape and dtype on every rank. It is not written.
        mesh: the ranks.
        op: "sum", "mean", "max" or "min".
        axis: number or name of a mesh axis, several of them, or None for all.

    Returns:
        A fresh tensor, equal on those ranks bit for bit. Backward: sum and mean: the sum (mean) of
        the ranks' gradients; max and min: to the ranks that hold the extreme, ties share.

    Raises:
        ValueError: an op or axis that does not exist.
    """
    if axis is None:
        axes = list(range(mesh.ndim))
    else:
        listed = [axis] if isinstance(axis, (int, str)) else list(axis)
        axes = [_axis_of(a, mesh, "all_reduce") for a in listed]
    ranks = core_mesh(mesh)
    if op in ("sum", "mean"):
        total = core.enter(core.reduce_sum(tensor, ranks, axes), ranks, axes)
        count = 1
        for a in axes:
            count *= mesh.size(a)
        return total / count if op == "mean" else total
    if op not in ("max", "min"):
        raise ValueError(f"all_reduce: expected op sum, mean, max or min, got {op!r}")
    from shardfield.distributed import fused_all_reduce

    kind = dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.MIN
    for a in axes:
        (tensor,) = fused_all_reduce([tensor], op=kind, group=mesh.get_group(a))
    return tensor
