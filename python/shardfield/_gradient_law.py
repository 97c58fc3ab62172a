"""Wrappers that reduce gradients themselves, beside gradients that are summed over the domain already.

After backward the gradient of a plain parameter is the serial one on every rank of the domain. Sums
by hand are refused where they are made (shardfield/comm/gradient_law.h). DDP packs gradients into
buckets first, so it is looked at here; FSDP2 averages, which leaves equal values as they are, unless
it is told to divide by something else.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

from shardfield._autograd_graph import nodes_of
from shardfield._core import core
from shardfield._mesh import _device_meshes, device_mesh_of

_DDP = torch.nn.parallel.DistributedDataParallel
_watched: weakref.WeakKeyDictionary[torch.nn.Module, list[Any]] = weakref.WeakKeyDictionary()


def _sharded_leaves(*values: Any) -> Iterable[torch.Tensor]:
    for leaf in torch.utils._pytree.tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and core.is_sharded(leaf):
            yield leaf


def _domains_of(x: torch.Tensor) -> list[list[int]]:
    """The global ranks of each domain of the mesh of a sharded tensor."""
    mesh = device_mesh_of(core.mesh_of(x))
    cut = {axis for _, axes, _ in core.cuts(x) for axis in axes}
    grid = mesh.mesh.permute(*sorted(range(mesh.ndim), key=lambda a: a in cut))
    count = 1
    for a, n in enumerate(mesh.mesh.shape):
        count *= 1 if a in cut else n
    return grid.reshape(count, -1).tolist()


def _refuse_ddp(group: Iterable[int], domain: Iterable[int]) -> None:
    ranks = sorted(group)
    shared = sorted(set(ranks).intersection(domain))
    if len(shared) > 1:
        raise RuntimeError(
            f"DistributedDataParallel: its group {ranks} holds ranks {shared} of one domain, over which "
            "gradients are already summed; build DDP on the data axis only (process_group=mesh['data'].get_group())"
        )


def _watch(module: Any) -> None:
    """Looks at each gradient of the first backward before DDP packs it."""
    if module in _watched:
        for handle in _watched[module]:
            handle.remove()
        _watched[module] = []
        return
    if not _device_meshes:  # nothing was ever sharded
        return
    group = dist.get_process_group_ranks(module.process_group)

    def look(parameter: torch.Tensor) -> None:
        domain = None if parameter.grad is None else core.summed_ranks(parameter.grad)
        if domain:
            _refuse_ddp(group, domain)

    _watched[module] = [
        p.register_post_accumulate_grad_hook(look) for p in module.parameters() if p.requires_grad
    ]


def _patch_ddp() -> None:
    stock = _DDP.forward

    @functools.wraps(stock)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        for leaf in _sharded_leaves(args, kwargs):
            for domain in _domains_of(leaf):
                _refuse_ddp(dist.get_process_group_ranks(self.process_group), domain)
        _watch(self)
        return stock(self, *args, **kwargs)

    _DDP.forward = forward  # type: ignore[method-assign]


def _patch_fsdp_divide_factor() -> None:
    """A divisor other than the number of ranks turns FSDP2's average into a sum, or half of one."""
    stock = FSDPModule.set_gradient_divide_factor

    @functools.wraps(stock)
    def set_gradient_divide_factor(self: Any, factor: float) -> None:
        stock(self, factor)
        parameters = self._get_fsdp_state()._fsdp_param_group
        if parameters is None:
            return
        group = set(parameters.mesh_info.mesh.mesh.flatten().tolist())

        def look(_module: Any, args: Any, kwargs: Any, out: Any) -> None:
            for leaf in _sharded_leaves(args, kwargs, out):
                for domain in _domains_of(leaf):
                    shared = len(group.intersection(domain))
                    if shared > 1 and factor % shared:
                        raise RuntimeError(
                            f"set_gradient_divide_factor({factor}): the FSDP mesh {sorted(group)} holds {shared} ranks "
                            f"of the domain {domain}, over which gradients are already summed: they are added {shared} "
                            f"times; divide by a multiple of {shared}, or shard over the data axis alone "
                            "(fully_shard(..., mesh=mesh['data']))"
                        )

        if hasattr(self, "_shardfield_divide_hook"):
            self._shardfield_divide_hook.remove()
        self._shardfield_divide_hook = self.register_forward_hook(look, with_kwargs=True)

    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor  # type: ignore[method-assign]


def is_result_of_sharded(value: torch.Tensor) -> bool:
    """Whether a plain tensor was computed from sharded ones without to_local(): then it is equal on
    all ranks of the domain. Local; reads the graph that autograd recorded.
    """
    for node in nodes_of(value, lambda n: "shardfield::" not in n.name()):
        name = node.name()
        if "shardfield::" in name and "LocalNode" not in name and "shardfield::comm::" not in name:
            return True
    return False


def install() -> None:
    """Puts the checks in place; done once at import."""
    _patch_ddp()
    _patch_fsdp_divide_factor()
