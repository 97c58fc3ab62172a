"""Gradients that the caller hands in: DTensors become sharded tensors, batched ones get a sentence.

`torch.func` transforms wrap tensors above the sharded kernels and work. The older way of batching
(vmap over `torch.autograd.grad`) runs the recorded nodes themselves on batched gradients, which
PyTorch does not offer to C++ nodes.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from shardfield._autograd_graph import nodes_of
from shardfield._core import core
from shardfield.domain_parallel import _boundary  # noqa: F401  its patches go first
from shardfield.domain_parallel._dtensor import from_dtensor


def _meets_sharded(value: torch.Tensor) -> bool:
    """Whether a sharded tensor is in the graph of `value`. Local."""
    if core.is_sharded(value):
        return True
    for node in nodes_of(value):
        leaf = getattr(node, "variable", None)
        if "shardfield::" in node.name() or (leaf is not None and core.is_sharded(leaf)):
            return True
    return False


def _is_sharded(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and core.is_sharded(out)


def _is_batched(grad: Any) -> bool:
    return isinstance(grad, torch.Tensor) and torch._C._functorch.is_batchedtensor(grad)


def _patch_grad_outputs() -> None:
    stock = torch.autograd._make_grads

    @functools.wraps(stock)
    def make_grads(outputs: Any, grads: Any, is_grads_batched: bool) -> Any:
        if is_grads_batched or any(_is_batched(grad) for grad in grads):
            tensors = [out for out in outputs if isinstance(out, torch.Tensor)]
            if any(_meets_sharded(out) for out in tensors):
                raise RuntimeError(
                    "autograd.grad: batched gradients (is_grads_batched, jacobian or hessian with vectorize=True) expected "
                    "plain tensors, got the result of a sharded computation; use vectorize=False, or torch.func.jacrev "
                    "and torch.func.hessian"
                )
        given = [
            from_dtensor(grad) if isinstance(grad, DTensor) and _is_sharded(out) else grad
            for out, grad in zip(outputs, grads, strict=True)
        ]
        return stock(outputs, given, is_grads_batched)

    torch.autograd._make_grads = make_grads


def _patch_grad_setter() -> None:
    stock: Any = torch.Tensor.grad

    def set_(self: torch.Tensor, value: Any) -> None:
        if isinstance(value, DTensor) and core.is_sharded(self):
            value = from_dtensor(value)
        stock.fset(self, value)

    torch.Tensor.grad = property(stock.fget, set_, stock.fdel)  # type: ignore[assignment]


def install() -> None:
    """Puts the patches in place; done once at import."""
    _patch_grad_outputs()
    _patch_grad_setter()


install()
