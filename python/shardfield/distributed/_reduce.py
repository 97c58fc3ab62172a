"""Reductions over a group: a loss for the log, and many tensors in few messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from shardfield._core import core
from shardfield._gradient_law import is_result_of_sharded
from shardfield.distributed._collectives import all_gather_v, gather_v
from shardfield.distributed._groups import Group, default_device, group_mesh, process_group

BUCKET_BYTES = 25 << 20

_OPS = {
    dist.ReduceOp.SUM: "sum",
    dist.ReduceOp.AVG: "avg",
    dist.ReduceOp.MIN: "min",
    dist.ReduceOp.MAX: "max",
    dist.ReduceOp.PRODUCT: "product",
}


def reduce_loss(
    loss: float | torch.Tensor, dst_rank: int = 0, mean: bool = True, group: Group = None
) -> Any:
    """The mean (or sum) of the ranks' losses, on one rank. Collective over the group.

    Args:
        loss: a number, or a tensor of one element.
        dst_rank: rank inside the group that gets the result.
        mean: divide by the number of ranks.
        group: process group, mesh, name of a group, or None for all ranks.

    Returns:
        For a number: a float on `dst_rank`, None elsewhere. For a tensor: a scalar on `dst_rank`, a
        tensor without elements elsewhere; differentiable (all ranks must run backward), each
        rank's gradient is that of `dst_rank`, over the number of ranks for a mean.

    Raises:
        ValueError: a tensor of several elements.
        RuntimeError: on every rank, when a loss that is to be differentiated is the result of a
            sharded computation and the group holds several ranks of its domain.
    """
    if not isinstance(loss, torch.Tensor):
        if not dist.is_initialized():
            return float(loss)
        device = default_device(group, "reduce_loss")
        # gloo and NCCL carry float64, some accelerators do not.
        dtype = torch.float64 if device.type in ("cpu", "cuda") else torch.float32
        reduced = reduce_loss(
            torch.tensor(float(loss), dtype=dtype, device=device), dst_rank, mean, group
        )
        return float(reduced) if reduced.numel() else None
    if loss.numel() != 1:
        raise ValueError(
            f"reduce_loss: expected one element, got {tuple(loss.shape)}; reduce it on its rank first"
        )
    found = process_group(group, "reduce_loss")
    if found.size() > 1 and is_result_of_sharded(loss):
        _refuse_equal_losses(loss, found)
    losses = gather_v(loss.reshape(1), [1] * found.size(), 0, dst_rank, found)
    if found.rank() != dst_rank:
        return losses
    if mean and not (losses.is_floating_point() or losses.is_complex()):
        return losses.mean(dtype=torch.get_default_dtype())
    return losses.mean() if mean else losses.sum()


def _refuse_equal_losses(loss: torch.Tensor, group: dist.ProcessGroup) -> None:
    """A loss of a sharded computation is one loss on all ranks of the domain, not a rank's own: the
    mean over the ranks would divide its gradient by their number.
    """
    with torch.no_grad():
        losses = all_gather_v(loss.detach().reshape(1), [1] * group.size(), group=group).tolist()
    if len(set(losses)) == len(losses):
        return
    same = [r for r, value in enumerate(losses) if losses.count(value) > 1]
    raise RuntimeError(
        f"reduce_loss: expected every rank's own loss, got one that is reduced over the domain already and equal "
        f"on the ranks {same} of the group, on rank {group.rank()} of {group.size()}; its gradient would be divided "
        "by their number. Call backward on the loss itself, reduce over the data axis alone (group=mesh['data']), "
        "and pass loss.detach() for a log"
    )


def _leaves(value: Any, found: list[torch.Tensor]) -> None:
    """The tensors of a nested structure; mappings in the order of their sorted keys."""
    if isinstance(value, torch.Tensor):
        found.append(value)
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _leaves(value[key], found)
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for item in value:
            _leaves(item, found)
    else:
        raise TypeError(
            "fused_all_reduce: expected tensors in (nested) mappings or sequences, got "
            f"{type(value).__name__}"
        )


def _rebuilt(value: Any, next_tensor: Callable[[], torch.Tensor]) -> Any:
    """The same structure with other tensors, taken in the order of `_leaves`."""
    if isinstance(value, torch.Tensor):
        return next_tensor()
    if isinstance(value, Mapping):
        made = {key: _rebuilt(value[key], next_tensor) for key in sorted(value, key=str)}
        if type(value) is dict:
            return {key: made[key] for key in value}
        out = copy.copy(value)
        for key, item in made.items():
            out[key] = item  # type: ignore[index]
        return out
    items = [_rebuilt(item, next_tensor) for item in value]
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return items


class _Done:
    """The handle of a reduction that is complete."""

    def wait(self, timeout: Any = None) -> bool:
        """Returns at once."""
        del timeout
        return True

    def is_completed(self) -> bool:
        """Always true."""
        return True


def fused_all_reduce(
    tensors: Any,
    *,
    op: Any = dist.ReduceOp.SUM,
    group: Group = None,
    buffer_dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    async_op: bool = False,
    bucket_bytes: int = BUCKET_BYTES,
) -> Any:
    """Reduces many tensors over the group in few messages. Collective over the group.

    Tensors of one dtype share messages of up to `bucket_bytes`; one travels while the next is
    packed. Inputs stay as they are.

    Args:
        tensors: a tensor, or tensors in nested lists, tuples or mappings; alike on all ranks.
        op: torch.distributed.ReduceOp SUM, AVG, MIN, MAX or PRODUCT. NaN wins in MIN and MAX.
        group: process group, mesh, name of a group, or None for all ranks.
        buffer_dtype: dtype of the messages of floating-point tensors; by default their own, float32
            for 16-bit ones.
        device: where the messages are built; by default the tensors' device.
        async_op: also return a handle. No unfinished tensor is handed out: the call returns when
            the result is there, and the handle is done.
        bucket_bytes: upper size of one message.

    Returns:
        The same structure of fresh tensors, and a handle with `async_op`. Backward: the gradients
        summed over ranks (AVG: over their number; MIN and MAX: to the ranks that hold the extreme,
        ties share). PRODUCT has no gradient.

    Raises:
        TypeError: anything else than tensors in the structure.
        RuntimeError: on every rank when shapes or dtypes differ between ranks.

    Example:
        >>> fused_all_reduce({"loss": loss, "count": count})  # two dtypes, two messages
    """
    found: list[torch.Tensor] = []
    _leaves(tensors, found)
    if op not in _OPS:
        raise ValueError(f"fused_all_reduce: expected SUM, AVG, MIN, MAX or PRODUCT, got {op}")
    if not dist.is_initialized() and group is None:
        reduced = [t.clone() for t in found]
    else:
        moved = found if device is None else [t.to(device) for t in found]
        where = moved[0].device if moved else default_device(group, "fused_all_reduce")
        mesh = group_mesh(group, where, "fused_all_reduce")
        reduced = core.fused_all_reduce(moved, mesh, _OPS[op], buffer_dtype, bucket_bytes)
        reduced = [r.to(t.device) for r, t in zip(reduced, found, strict=True)]
    left = iter(reduced)
    result = _rebuilt(tensors, lambda: next(left))
    return (result, _Done()) if async_op else result
