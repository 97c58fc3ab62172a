"""Collectives on a rank's own tensors: uneven along any dim, and differentiable any number of times.

Values are per-rank: every rank has its own tensor and its own loss, and the gradient is that of the
sum of all ranks' losses. Each function's backward is its adjoint, so all ranks of the group must
run backward when one does. Inputs may be strided, empty along `dim`, and of any dtype; results are
fresh and contiguous. The calls are compared over the group before data moves; what differs is an
error on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardfield._core import core
from shardfield.distributed._groups import Group, default_device, group_mesh


def all_gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: Group = None,
) -> torch.Tensor:
    """Every rank's rows on every rank, in rank order. Collective over the group.

    Args:
        tensor: this rank's rows, `sizes[rank]` along `dim`.
        sizes: rows of each rank; equal on all ranks.
        dim: the dim the rows are counted along.
        use_fp32: add 16-bit gradients in float32.
        group: process group, mesh, name of a group, or None for all ranks.

    Returns:
        `sum(sizes)` rows. Backward: each rank's own rows of the gradient summed over ranks.

    Raises:
        RuntimeError: on every rank, with what each passed, when the arguments do not fit.

    Example:
        >>> # rank 0 holds [1.], rank 1 holds [2., 3.]
        >>> all_gather_v(x, [1, 2])
        tensor([1., 2., 3.])
    """
    mesh = group_mesh(group, tensor.device, "all_gather_v")
    return core.all_gather_v(tensor, mesh, list(sizes), dim, use_fp32)


def reduce_scatter_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    use_fp32: bool = True,
    group: Group = None,
) -> torch.Tensor:
    """This rank's rows of the sum over ranks (of the "or" for bool). Collective over the group.

    Args:
        tensor: `sum(sizes)` rows along `dim`.
        sizes: rows each rank keeps; equal on all ranks.
        dim: the dim the rows are counted along.
        use_fp32: add 16-bit values in float32.
        group: process group, mesh, name of a group, or None for all ranks.

    Returns:
        `sizes[rank]` rows. Backward: all_gather_v of the gradient.

    Raises:
        RuntimeError: on every rank, with what each passed, when the arguments do not fit.
    """
    mesh = group_mesh(group, tensor.device, "reduce_scatter_v")
    return core.reduce_scatter_v(tensor, mesh, list(sizes), dim, use_fp32)


def gather_v(
    tensor: torch.Tensor,
    sizes: Sequence[int],
    dim: int = 0,
    dst: int = 0,
    group: Group = None,
) -> torch.Tensor:
    """All rows on one rank. Collective over the group.

    Args:
        tensor: this rank's rows, `sizes[rank]` along `dim`.
        sizes: rows of each rank; equal on all ranks.
        dim: the dim the rows are counted along.
        dst: rank inside the group that gets the rows.
        group: process group, mesh, name of a group, or None for all ranks.

    Returns:
        `sum(sizes)` rows on `dst`, 0 rows elsewhere. Backward (all ranks must run it): scatters the
        gradient of `dst`.

    Raises:
        RuntimeError: on every rank, with what each passed, when the arguments do not fit.
    """
    mesh = group_mesh(group, tensor.device, "gather_v")
    return core.gather_v(tensor, mesh, list(sizes), dim, dst)


def scatter_v(
    tensor: torch.Tensor | None,
    sizes: Sequence[int],
    dim: int = 0,
    src: int = 0,
    group: Group = None,
) -> torch.Tensor:
    """One rank's rows to their ranks. Collective over the group.

    Args:
        tensor: `sum(sizes)` rows along `dim` on `src`; not read elsewhere and may be None there
            (shape and dtype are announced by `src`).
        sizes: rows each rank gets; equal on all ranks.
        dim: the dim the rows are counted along.
        src: rank inside the group that has the rows.
        group: process group, mesh, name of a group, or None for all ranks.

    Returns:
        `sizes[rank]` rows. Backward (all ranks must run it): gathers the gradient on `src`.

    Raises:
        RuntimeError: on every rank, with what each passed, when the arguments do not fit.
    """
    device = default_device(group, "scatter_v") if tensor is None else tensor.device
    mesh = group_mesh(group, device, "scatter_v")
    return core.scatter_v(tensor, mesh, list(sizes), dim, src, str(device))


def all_to_all_v(
    tensor: torch.Tensor,
    sizes: Sequence[Sequence[int]],
    dim: int = 0,
    group: Group = None,
) -> torch.Tensor:
    """Blocks of rows to every rank and from every rank. Collective over the group.

    Args:
        tensor: the rows for rank 0, then those for rank 1, ... along `dim`.
        sizes: `sizes[i][j]`: rows that rank i sends to rank j; equal on all ranks.
        dim: the dim the rows are counted along.
        group: process group, mesh, name of a group, or None for all ranks.

    Returns:
        The rows from rank 0, then those from rank 1, ... Backward: the same the other way round.

    Raises:
        RuntimeError: on every rank, with what each passed, when the arguments do not fit.
    """
    mesh = group_mesh(group, tensor.device, "all_to_all_v")
    return core.all_to_all_v(tensor, mesh, [list(row) for row in sizes], dim)


def indexed_all_to_all_v(
    tensor: torch.Tensor,
    indices: Sequence[torch.Tensor],
    sizes: Sequence[Sequence[int]],
    use_fp32: bool = True,
    dim: int = 0,
    group: Group = None,
) -> torch.Tensor:
    """Chosen rows to every rank, and theirs back. Collective over the group.

    Args:
        tensor: this rank's rows.
        indices: int64, `indices[r]`: rows along `dim` that go to rank r, in any order, repeated or
            not.
        sizes: `sizes[i][j]`: how many rows rank i sends to rank j; equal on all ranks.
        use_fp32: add 16-bit gradients in float32.
        dim: the dim the rows are counted along.
        group: process group, mesh, name of a group, or None for all ranks.

    Returns:
        The rows from rank 0, then those from rank 1, ... Backward: gradients travel back and are
        added at their rows.

    Raises:
        RuntimeError: on every rank, with what each passed, when the arguments do not fit.
    """
    mesh = group_mesh(group, tensor.device, "indexed_all_to_all_v")
    rows = [list(row) for row in sizes]
    return core.indexed_all_to_all_v(tensor, mesh, list(indices), rows, use_fp32, dim)


def set_call_checks(on: bool) -> None:
    """Switches the comparison of calls over the group on (default) or off. Per process; set it alike
    on all ranks. It costs one message of some hundred bytes per call; without it, calls that do not
    fit together end at the group's timeout. `scatter_v` and `gather_v` always announce theirs.
    """
    core.set_call_checks(on)


def set_check_level(level: str) -> None:
    """How much the ranks compare before data moves. Per process; set it alike on all ranks. Local.

    Args:
        level: "off": nothing; calls that do not fit together end at the group's timeout.
            "cheap" (default): the collectives of this module.
            "full": every transfer of the library, those of sharded tensors too: op, kind, dtype,
            sizes, peers, bytes; and the values of plain tensors in ops with sharded ones. What
            differs is an error on every rank, with a line for each. One more message per transfer,
            and one per op with plain operands.

    Raises:
        RuntimeError: another word.
    """
    core.set_check_level(level)


def check_level() -> str:
    """The level of `set_check_level`. Local."""
    return core.check_level()
