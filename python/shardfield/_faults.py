"""What a rank knows when a transfer fails: the layer that was running, and what the other ranks told.

A rank that raises writes its error to the job's store before it leaves; a rank whose transfer fails
writes what it was doing, and reads what the others wrote. Nothing here starts a collective.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist

from shardfield._core import core

_PREFIX = "shardfield/fault/"
_WAIT_S = 1.5
_OLD_S = 120.0
_MAX_CHARS = 400
_MOST_RANKS = 64
_LAYER = "shardfield_layer"
_seen: dict[int, bytes] = {}
_hooked = False


# ----------------------------------------------------------------------------------------- layers


def _running_modules() -> list[torch.nn.Module]:
    """The modules whose forward runs on this thread, outermost first."""
    call = torch.nn.Module._call_impl.__code__
    found: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is call:
            module = frame.f_locals.get("self")
            if isinstance(module, torch.nn.Module) and (not found or found[-1] is not module):
                found.append(module)
        frame = frame.f_back
    return found[::-1]


def running_layer() -> str:
    """The layer whose forward runs on this thread, as "Class.name.of.submodule"; "" outside. Local."""
    modules = _running_modules()
    if not modules:
        return ""
    path = [type(modules[0]).__name__]
    for outer, inner in itertools.pairwise(modules):
        names = [name for name, m in outer.named_modules() if m is inner]
        path.append(names[0] if names and names[0] else type(inner).__name__)
    return ".".join(path)


def _mark_backward(layer: str, inputs: Any, outputs: Any) -> None:
    """Writes the layer on the autograd nodes that its forward made."""
    inputs, outputs = (
        torch.utils._pytree.tree_leaves((inputs,)),
        torch.utils._pytree.tree_leaves(outputs),
    )
    seen = {x.grad_fn for x in inputs if isinstance(x, torch.Tensor)}
    todo = [y.grad_fn for y in outputs if isinstance(y, torch.Tensor)]
    while todo:
        node = todo.pop()
        if node is None or node in seen or _LAYER in node.metadata:
            continue
        node.metadata[_LAYER] = layer
        todo.extend(edge for edge, _ in node.next_functions)


def _backward_layer() -> str:
    """The layer whose backward runs on this thread, when `name_layers` wrote it down."""
    node = torch._C._current_autograd_node()
    return node.metadata.get(_LAYER, "") if node is not None else ""


class LayerNames:
    """What `name_layers` put in place."""

    def __init__(self, hooks: list[Any]) -> None:
        self._hooks = hooks

    def remove(self) -> None:
        """Layers are not named any more."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def name_layers(model: torch.nn.Module) -> LayerNames:
    """Makes the errors of backward name the layer, as those of forward do. Local.

    Costs some microseconds per module call and autograd node.

    Args:
        model: its submodules' names are the layers' names.

    Returns:
        A handle; `remove()` takes the hooks off.
    """
    hooks: list[Any] = []

    def hook(name: str, module: torch.nn.Module) -> None:
        layer = core.intern_layer(name)
        outer: list[int] = []

        def before(_module: torch.nn.Module, _args: Any) -> None:
            outer.append(core.current_layer())
            core.set_current_layer(layer)

        def after(_module: torch.nn.Module, args: Any, out: Any) -> None:
            core.set_current_layer(outer.pop() if outer else 0)
            if torch.is_grad_enabled():
                _mark_backward(name, args, out)

        hooks.append(module.register_forward_pre_hook(before))
        hooks.append(module.register_forward_hook(after, always_call=True))

    for name, module in model.named_modules():
        hook(name or type(model).__name__, module)
    return LayerNames(hooks)


# ------------------------------------------------------------------------------------ other ranks


def _store() -> Any:
    if not dist.is_available() or not dist.is_initialized():
        return None
    return dist.distributed_c10d._get_default_store()


def tell(kind: str, text: str) -> None:
    """Writes what this rank met to the job's store. Local; never raises."""
    with contextlib.suppress(Exception):
        store = _store()
        if store is not None:
            message = {"kind": kind, "text": text[:_MAX_CHARS], "time": time.time()}
            store.set(f"{_PREFIX}{dist.get_rank()}", json.dumps(message))


def _read(store: Any, rank: int) -> dict[str, Any] | None:
    """What a rank wrote since this rank looked last."""
    key = f"{_PREFIX}{rank}"
    if not store.check([key]):
        return None
    raw = store.get(key)
    if _seen.get(rank) == raw:
        return None
    message = json.loads(raw)
    if time.time() - message["time"] > _OLD_S:
        return None
    _seen[rank] = raw
    return message


def _looked_at() -> list[int]:
    """The ranks whose words are read: all others, of very many the ones with the nearest numbers."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if size <= _MOST_RANKS:
        return [r for r in range(size) if r != rank]
    first = min(max(0, rank - _MOST_RANKS // 2), size - _MOST_RANKS)
    return [r for r in range(first, first + _MOST_RANKS) if r != rank]


def _collect(store: Any) -> dict[int, dict[str, Any]]:
    """What the other ranks wrote, within a bound; at once when one of them tells the cause."""
    others = _looked_at()
    told: dict[int, dict[str, Any]] = {}
    end = time.monotonic() + _WAIT_S
    while True:
        for rank in others:
            message = _read(store, rank)
            if message is not None:
                told[rank] = message
        done = len(told) == len(others) or any(m["kind"] == "raised" for m in told.values())
        if done or time.monotonic() > end:
            return told
        time.sleep(0.05)


def _notes(call: str, _cause: str) -> str:
    layer = running_layer() or _backward_layer()
    where = f" in layer '{layer}'" if layer and "in layer" not in call else ""
    parts = [f"This rank was{where}"] if where else []
    try:
        store = _store()
        if store is None:
            return ". ".join(parts)
        tell("stopped", call + where)
        told = _collect(store)
        silent = [r for r in _looked_at() if r not in told]
        for rank, message in sorted(told.items(), key=lambda item: item[1]["kind"] != "raised"):
            verb = "raised" if message["kind"] == "raised" else "stopped at"
            parts.append(f"Rank {rank} {verb} {message['text']}")
        if silent and not any(m["kind"] == "raised" for m in told.values()):
            parts.append(f"Ranks {silent} told nothing: killed, gone, or still at work")
    except Exception:
        parts.append("The job's store does not answer: its host (rank 0, or the launcher) is gone")
    return ". ".join(parts)


@contextlib.contextmanager
def tell_failures() -> Iterator[None]:
    """Inside this block an exception is told to the other ranks before it goes on. Local.

    Their transfers then fail with this rank's error in the message. `DistributedManager.initialize()`
    does the same for exceptions that end the process.
    """
    try:
        yield
    except BaseException as error:
        _tell_error(type(error), error, error.__traceback__)
        raise


def _tell_error(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    place = ""
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is not None:
        place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})"
    if "a peer failed, left, or made another call" not in str(error):  # told where it happened
        tell("raised", f"{kind.__name__}: {error}{place}")


def tell_uncaught() -> None:
    """Exceptions that end the process are told to the other ranks first. Local; once per process."""
    global _hooked
    if _hooked:
        return
    _hooked = True
    stock = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _tell_error(kind, error, trace)
        stock(kind, error, trace)

    sys.excepthook = hook


def install() -> None:
    """Failed transfers ask here for their notes; done once at import."""
    core.set_failure_notes(_notes)
