"""User handlers: a Python function, an op overload, or an op by name."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardfield._core import core

_libraries: list[torch.library.Library] = []  # a kernel lives as long as its library


def _any_sharded(args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(a, torch.Tensor) and core.is_sharded(a) for a in tree_leaves((args, kwargs))
    )


class HandlerHandle:
    """What the register functions return: takes the handler off again."""

    def __init__(self, undo: Callable[[], None]):
        self._undo: Callable[[], None] | None = undo

    def remove(self) -> None:
        """Puts a function back as it was before any handler, an op as before this one. May be
        called again.
        """
        if self._undo is not None:
            self._undo()
        self._undo = None


def register_function_handler(
    func: Callable[..., Any], handler: Callable[..., Any]
) -> HandlerHandle:
    """Replaces `func` where it is found (its module, or torch.Tensor) by a dispatching wrapper."""
    target = getattr(func, "__shardfield_wrapped__", func)

    @functools.wraps(target)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _any_sharded(args, kwargs):
            return handler(target, (torch.Tensor,), args, kwargs)
        return target(*args, **kwargs)

    wrapper.__shardfield_wrapped__ = target  # type: ignore[attr-defined]
    replaced: list[tuple[Any, str]] = []
    places = [torch.Tensor, torch, torch.nn.functional, torch.special, torch.linalg, torch.fft]
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    if module is not None:
        places.append(module)
    for place in places:
        for name in {
            getattr(target, "__name__", ""),
            *(n for n in vars(place) if vars(place)[n] is func),
        }:
            if name and vars(place).get(name) in (func, target):
                setattr(place, name, wrapper)
                replaced.append((place, name))
    if not replaced:
        raise ValueError(
            f"register_function_handler: {func!r} was not found under its own name in its module; "
            "register the op overload instead (register_dispatch_handler)"
        )

    def undo() -> None:
        for place, name in replaced:
            setattr(place, name, target)

    return HandlerHandle(undo)


def _implement(namespace: str, name: str, op: Any, handler: Callable[..., Any]) -> HandlerHandle:
    library = torch.library.Library(namespace, "IMPL")
    _libraries.append(library)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return handler(op(), (torch.Tensor,), args, kwargs)

    with warnings.catch_warnings():  # torch's own, that a kernel is replaced: it is meant
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        library.impl(name, kernel, "PrivateUse3", allow_override=True)
        library.impl(name, kernel, "AutogradPrivateUse3", allow_override=True)

    def undo() -> None:
        _libraries.remove(library)
        library._destroy()

    return HandlerHandle(undo)


def register_dispatch_handler(op: Any, handler: Callable[..., Any]) -> HandlerHandle:
    """Puts `handler` in place of the library's kernel of one op overload."""
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(
            f"register_dispatch_handler: expected an op overload such as torch.ops.aten.dot.default, got {op!r}"
        )
    namespace, _, base = op._schema.name.partition("::")
    overload = op._schema.overload_name
    return _implement(namespace, f"{base}.{overload}" if overload else base, lambda: op, handler)


def register_named_function_handler(name: str, handler: Callable[..., Any]) -> HandlerHandle:
    """As register_dispatch_handler, by name; the op may not exist yet."""
    normal = name.replace("::", ".")
    parts = normal.split(".")
    if len(parts) not in (2, 3):
        raise ValueError(
            f"register_named_function_handler: expected 'namespace::op.overload', got {name!r}"
        )
    namespace, base = parts[0], parts[1]
    overload = parts[2] if len(parts) == 3 else "default"
    schema_name = base if overload == "default" else f"{base}.{overload}"

    def find() -> Any:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload)

    return _implement(namespace, schema_name, find, handler)
