"""Modules whose parameters are shared by the ranks of a group: gradients are summed over it."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from shardfield._core import core
from shardfield.distributed._groups import Group
from shardfield.distributed._groups import process_group as resolved
from shardfield.distributed._reduce import fused_all_reduce

_HOOK = "_shardfield_shared_hook"


def mark_module_as_shared(
    module: torch.nn.Module,
    process_group: Group = None,
    recurse: bool = True,
    use_fp32_reduction: bool = True,
) -> torch.nn.Module:
    """Sums the gradients of a module's parameters over a group during backward, once. Local.

    For modules whose ranks each work on their own part of one computation without sharded tensors.
    (Gradients of a computation on sharded tensors are summed already.) Every backward is
    collective over the group then; accumulation over several backwards adds what each summed.

    Args:
        module: the module; its parameters must be equal on all ranks of the group.
        process_group: process group, mesh, name of a group, or None for all ranks.
        recurse: also the submodules' parameters.
        use_fp32_reduction: sum 16-bit gradients in float32.

    Returns:
        The module.

    Raises:
        RuntimeError: a parameter is marked already, or is cut over ranks.
    """
    group = resolved(process_group, "mark_module_as_shared")
    parameters = dict(module.named_parameters(recurse=recurse))
    for name, p in parameters.items():
        if hasattr(p, _HOOK):
            raise RuntimeError(
                f"mark_module_as_shared: '{name}' is marked already; call unmark_module_as_shared first"
            )
        if isinstance(p, DTensor) or core.is_sharded(p):
            raise RuntimeError(
                f"mark_module_as_shared: '{name}' is cut over ranks; its gradient belongs to its piece"
            )
    dtype = torch.float32 if use_fp32_reduction else None

    def summed(grad: torch.Tensor) -> torch.Tensor:
        narrow = grad.dtype in (torch.float16, torch.bfloat16)
        return fused_all_reduce(
            grad, group=group, buffer_dtype=(dtype or grad.dtype) if narrow else None
        )

    for p in parameters.values():
        if p.requires_grad:
            setattr(p, _HOOK, p.register_hook(summed))
    return module


def unmark_module_as_shared(module: torch.nn.Module, recurse: bool = True) -> torch.nn.Module:
    """Takes back mark_module_as_shared. Local.

    Raises:
        RuntimeError: a parameter that requires grad is not marked.
    """
    parameters = {n: p for n, p in module.named_parameters(recurse=recurse) if p.requires_grad}
    for name, p in parameters.items():
        if not hasattr(p, _HOOK):
            raise RuntimeError(f"unmark_module_as_shared: '{name}' is not marked")
    for p in parameters.values():
        getattr(p, _HOOK).remove()
        delattr(p, _HOOK)
    return module
