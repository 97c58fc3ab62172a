"""User handlers: a Python function, an op overload, or an op by name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from shardfield._core import core

_libraries: dict[tuple[str, str], torch.library.Library] = {}
_waiting: dict[str, Callable[..., Any]] = {}


def _any_sharded(args: Any, kwargs: Any) -> bool:
    return any(
        isinstance(a, torch.Tensor) and core.is_sharded(a) for a in tree_leaves((args, kwargs))
    )


class HandlerHandle:
    """What `register_function_handler` returns: takes the handler off again."""

    def __init__(self, places: list[tuple[Any, str]], func: Callable[..., Any]):
        self._places, self._func = places, func

    def remove(self) -> None:
        """Puts the function back as it was before any handler. May be called again."""
        for place, name in self._places:
            setattr(place, name, self._func)
        self._places = []


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
    return HandlerHandle(replaced, target)


def _implement(namespace: str, name: str, op: Any, handler: Callable[..., Any]) -> None:
    library = _libraries.setdefault((namespace, "IMPL"), torch.library.Library(namespace, "IMPL"))

    def kernel(*args: Any, **kwargs: Any) -> Any:
        return handler(op(), (torch.Tensor,), args, kwargs)

    library.impl(name, kernel, "PrivateUse3", allow_override=True)
    library.impl(name, kernel, "AutogradPrivateUse3", allow_override=True)


def register_dispatch_handler(op: Any, handler: Callable[..., Any]) -> None:
    """Puts `handler` in place of the library's kernel of one op overload."""
    if not isinstance(op, torch._ops.OpOverload):
        raise TypeError(
            f"register_dispatch_handler: expected an op overload such as torch.ops.aten.dot.default, got {op!r}"
        )
    namespace, _, base = op._schema.name.partition("::")
    overload = op._schema.overload_name
    _implement(namespace, f"{base}.{overload}" if overload else base, lambda: op, handler)


def register_named_function_handler(name: str, handler: Callable[..., Any]) -> None:
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

    _implement(namespace, schema_name, find, handler)
