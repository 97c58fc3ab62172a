"""Where Python code looks into a tensor: printing, copying, pickling, raw memory, compilation.

A sharded tensor has no storage, and what looks at all of it would have to communicate. Each place
gets a defined answer: no hang when one rank prints, no crash, and an error that names the call to use.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch._tensor_str

from shardfield import _faults, _gradient_law
from shardfield._core import core
from shardfield._mesh import placements_of

_NO_STORAGE = (
    "numpy", "tolist", "__array__", "__dlpack__", "data_ptr", "untyped_storage", "storage", "share_memory_",
    "resize_", "set_", "pin_memory",
)  # fmt: skip


def _describe(x: torch.Tensor) -> str:
    parts = [
        f"shape={tuple(x.shape)}",
        f"placements={placements_of(x)}",
        f"piece={tuple(core.piece_shape(x))}",
    ]
    parts.append(f"dtype={x.dtype}")
    if x.device.type != "cpu":
        parts.append(f"device={x.device}")
    if x.grad_fn is not None:
        parts.append(f"grad_fn=<{type(x.grad_fn).__name__}>")
    elif x.requires_grad:
        parts.append("requires_grad=True")
    return f"ShardTensor({', '.join(parts)})"


def _patch_printing() -> None:
    stock = torch._tensor_str._str

    @functools.wraps(stock)
    def text(self: torch.Tensor, *, tensor_contents: Any = None) -> str:
        # Metadata only: one rank may print alone.
        return (
            _describe(self)
            if core.is_sharded(self)
            else stock(self, tensor_contents=tensor_contents)
        )

    torch._tensor_str._str = text


def _deepcopy(x: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if not x.is_leaf:
        raise RuntimeError(
            "deepcopy: only leaves (tensors made by the user) can be deep-copied; detach() first"
        )
    if id(x) in memo:
        return memo[id(x)]
    with torch.no_grad():
        copied = x.detach().clone().requires_grad_(x.requires_grad)
        if x.grad is not None:
            copied.grad = x.grad.clone()
    memo[id(x)] = copied
    return copied


def _patch_copying() -> None:
    stock_deepcopy, stock_reduce = torch.Tensor.__deepcopy__, torch.Tensor.__reduce_ex__

    @functools.wraps(stock_deepcopy)
    def deepcopy(self: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        if type(self) is torch.Tensor and core.is_sharded(self):
            return _deepcopy(self, memo)
        return stock_deepcopy(self, memo)

    @functools.wraps(stock_reduce)
    def reduce(self: torch.Tensor, protocol: Any) -> Any:
        if core.is_sharded(self):
            raise RuntimeError(
                "pickle, torch.save, copy.copy: a ShardTensor is one piece of a tensor on this rank and cannot be "
                "pickled; save x.full_tensor(), or the pieces with shardfield.checkpoint.save_sharded"
            )
        return stock_reduce(self, protocol)

    torch.Tensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]
    torch.Tensor.__reduce_ex__ = reduce  # type: ignore[method-assign]


def _refusing(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def refuse(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if core.is_sharded(self):
            raise RuntimeError(
                f"Tensor.{name}: a ShardTensor has no memory of its own; use x.to_local() for this rank's piece or "
                "x.full_tensor() for all of it"
            )
        return stock(self, *args, **kwargs)

    return refuse


def _patch_memory() -> None:
    for name in _NO_STORAGE:
        setattr(torch.Tensor, name, _refusing(name, getattr(torch.Tensor, name)))
    stock_new_tensor = torch.Tensor.new_tensor

    @functools.wraps(stock_new_tensor)
    def new_tensor(self: torch.Tensor, data: Any, **kwargs: Any) -> torch.Tensor:
        if core.is_sharded(self):
            return core.local(self.detach()).new_tensor(data, **kwargs)
        return stock_new_tensor(self, data, **kwargs)

    torch.Tensor.new_tensor = new_tensor  # type: ignore[method-assign]


def _patch_grad_setter() -> None:
    """`x.grad = plain` with x sharded is cut like x, so that later gradients add up."""
    stock = torch.Tensor.grad

    def get(self: torch.Tensor) -> Any:
        return stock.__get__(self)

    def set_(self: torch.Tensor, value: Any) -> None:
        if isinstance(value, torch.Tensor) and core.is_sharded(self) != core.is_sharded(value):
            if core.is_sharded(self) and value.shape == self.shape:
                value = core.redistribute(value, core.mesh_of(self), core.cuts(self))
            elif core.is_sharded(value):
                raise RuntimeError(
                    "x.grad = g: g is sharded and x is plain; gradients of plain tensors are plain "
                    "(g.full_tensor())"
                )
        stock.__set__(self, value)

    def delete(self: torch.Tensor) -> None:
        stock.__delete__(self)

    torch.Tensor.grad = property(get, set_, delete)  # type: ignore[assignment]


def _patch_grad_outputs() -> None:
    """`x.backward(plain)` and `autograd.grad(x, ..., plain)`: the gradient is cut like x first."""
    stock = torch.autograd._make_grads

    @functools.wraps(stock)
    def make_grads(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
        aligned = []
        for out, grad in zip(outputs, grads, strict=False):
            if isinstance(out, torch.Tensor) and isinstance(grad, torch.Tensor):
                if core.is_sharded(out) and not core.is_sharded(grad) and out.shape == grad.shape:
                    grad = core.redistribute(grad, core.mesh_of(out), core.cuts(out))
                elif core.is_sharded(grad) and not core.is_sharded(out):
                    grad = core.gather(grad)
            aligned.append(grad)
        return stock(outputs, aligned, *args, **kwargs)

    torch.autograd._make_grads = make_grads


def _patch_compile() -> None:
    """torch.compile takes a ShardTensor for a plain one and would read its storage: leave the graph."""
    stock = torch.compile

    @functools.wraps(stock)
    def compile_(model: Any = None, *args: Any, **kwargs: Any) -> Any:
        compiled = stock(model, *args, **kwargs)
        if model is None or kwargs.get("disable"):
            return compiled
        return _eager_when_sharded(model, compiled, kwargs.get("fullgraph", False))

    torch.compile = compile_


def _has_sharded(args: Any, kwargs: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    return any(isinstance(a, torch.Tensor) and core.is_sharded(a) for a in leaves)


def _eager_when_sharded(raw: Any, compiled: Any, fullgraph: bool) -> Any:
    target = compiled.forward if isinstance(compiled, torch.nn.Module) else compiled
    eager = torch.compiler.disable(raw)

    @functools.wraps(raw.forward if isinstance(raw, torch.nn.Module) else raw)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _has_sharded(args, kwargs):
            return target(*args, **kwargs)
        if fullgraph:
            raise RuntimeError(
                "torch.compile(fullgraph=True): the arguments are sharded and sharded tensors run eagerly; "
                "drop fullgraph"
            )
        return eager(*args, **kwargs)

    if isinstance(compiled, torch.nn.Module):
        compiled.forward = call
        return compiled
    return call


def _patch_copy_copy() -> None:
    def shallow(self: torch.Tensor) -> torch.Tensor:
        if core.is_sharded(self):
            return self.detach().requires_grad_(self.requires_grad)
        return copy._reconstruct(self, None, *self.__reduce_ex__(4))  # type: ignore[attr-defined]

    torch.Tensor.__copy__ = shallow  # type: ignore[attr-defined]


def _patch_op_definition() -> None:
    """Ops defined after import get the gathering fallback as soon as they exist."""
    core.cover_late_ops()
    stock_define, stock_load = torch.library.Library.define, torch.ops.load_library

    @functools.wraps(stock_define)
    def define(self: Any, *args: Any, **kwargs: Any) -> Any:
        out = stock_define(self, *args, **kwargs)
        core.cover_late_ops()
        return out

    @functools.wraps(stock_load)
    def load_library(path: Any) -> None:
        stock_load(path)
        core.cover_late_ops()

    torch.library.Library.define = define  # type: ignore[method-assign]
    torch.ops.load_library = load_library  # type: ignore[method-assign]


def install() -> None:
    """Puts the patches in place; done once at import."""
    _patch_printing()
    _patch_copying()
    _patch_memory()
    _patch_grad_setter()
    _patch_grad_outputs()
    _patch_compile()
    _patch_copy_copy()
    _patch_op_definition()
    _gradient_law.install()
    _faults.install()


install()
