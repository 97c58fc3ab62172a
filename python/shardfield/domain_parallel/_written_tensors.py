"""Writing a sharded value into an ordinary tensor: `out = torch.zeros(...); out[..., :k] = y`.

Every rank holds an ordinary tensor whole, so the write would have to gather y, and whatever is made of
`out` would run whole on every rank. Where nothing but the caller's variable sees `out` (no view of it,
no graph that saved it), it becomes sharded first, by dropping what other ranks hold, and the write is
that of one sharded tensor into another. The values are the same either way.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from numbers import Integral
from types import FrameType
from typing import Any

import torch

from shardfield._core import core
from shardfield._mesh import Cuts

_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__")

# (dim of the tensor, whether all of it is written, length) for each dim of tensor[index]; None for a
# new dim of size 1.
_Window = list[tuple[int, bool, int] | None]


def _window(index: Any, shape: torch.Size) -> _Window | None:
    """What tensor[index] covers; None where an index is itself a tensor, a list or a mask."""
    entries = list(index) if isinstance(index, tuple) else [index]
    named = sum(e is not None and e is not Ellipsis for e in entries)
    dots = [i for i, e in enumerate(entries) if e is Ellipsis] or [len(entries)]
    if len(dots) > 1 or named > len(shape):
        return None
    entries[dots[0] : dots[0] + 1] = [slice(None)] * (len(shape) - named)
    window: _Window = []
    dim = 0
    for e in entries:
        if e is None:
            window.append(None)
            continue
        if isinstance(e, slice):
            taken = range(*e.indices(shape[dim]))
            window.append((dim, taken == range(shape[dim]), len(taken)))
        elif isinstance(e, bool) or not isinstance(e, Integral):
            return None
        dim += 1
    return window


def _cuts_of_written(shape: torch.Size, window: _Window, value: torch.Tensor) -> Cuts | None:
    """The cuts of value as cuts of the tensor it is written into; None where they have no place."""
    cuts: Cuts = []
    for dim, axes, sizes in core.cuts(value):
        place = len(window) - value.dim() + dim
        target = window[place] if place >= 0 else None
        if target is None or sum(sizes) != value.shape[dim] or target[2] != value.shape[dim]:
            return None
        into, whole, _ = target
        if any(into == d for d, _, _ in cuts):
            return None
        cuts.append((into, axes, sizes if whole else core.chunk_sizes(shape[into], len(sizes))))
    return cuts


def _is_buffer(tensor: torch.Tensor, writer: FrameType) -> bool:
    """True for a registered buffer of a module that the writing code has at hand, as its self."""
    modules = [m for m in writer.f_locals.values() if isinstance(m, torch.nn.Module)]
    return any(tensor is b for m in modules for b in m._buffers.values())


def _may_change(tensor: torch.Tensor, writer: FrameType, views: int = 0) -> bool:
    """A module's state stays as it is saved and loaded: whole."""
    return _is_unseen(tensor, views) and not _is_buffer(tensor, writer)


def _is_unseen(tensor: torch.Tensor, views: int) -> bool:
    """True when the caller's Python object and so many known views are all that refer to it."""
    if tensor.requires_grad or tensor.grad_fn is not None or tensor._use_count() != 1 + views:
        return False
    storage = tensor.untyped_storage()
    # NumPy arrays that share the memory are not counted, but they make it not resizable.
    if storage.is_shared() or not storage.resizable():
        return False
    # One for the tensor, one for each view, one for `storage` itself.
    return torch._C._storage_Use_Count(storage._cdata) == 2 + views


def _all_agree(mine: bool, value: torch.Tensor) -> bool:
    """True when it is true on every rank that holds a piece of value."""
    mesh = core.mesh_of(value)
    axes = sorted({axis for _, axes, _ in core.cuts(value) for axis in axes})
    doubts = core.reduce_sum(torch.tensor([0 if mine else 1], device=value.device), mesh, axes)
    return int(doubts) == 0


def _become_sharded(
    tensor: torch.Tensor, window: _Window | None, value: torch.Tensor, unseen: bool
) -> bool:
    """Makes an ordinary tensor sharded where it can be. Collective over value's cuts."""
    cuts = _cuts_of_written(tensor.shape, window, value) if window is not None else None
    if cuts is None or tensor.device != value.device:
        return False
    with torch.no_grad():
        if not _all_agree(unseen, value):
            return False
        # The clone does not hold on to the memory of the whole.
        sharded = core.redistribute(tensor, core.mesh_of(value), cuts).clone()
    torch._C._swap_tensor_impl(tensor, sharded)
    return True


def _indices(view: torch.Tensor, base: torch.Tensor, dim: int, place: int) -> Iterator[list[Any]]:
    """Indices of base[dim:] that give sizes and strides of view[place:]; see _index_of_view."""
    if dim == base.dim():
        if all(n == 1 for n in view.shape[place:]):
            yield [None] * (view.dim() - place)
        return
    stride = base.stride(dim)
    start = (view.storage_offset() - base.storage_offset()) // stride % base.shape[dim]
    if place < view.dim():
        length, step = view.shape[place], view.stride(place) // stride
        if step > 0:
            part = slice(start, start + step * (length - 1) + 1, step)
            yield from ([part, *rest] for rest in _indices(view, base, dim + 1, place + 1))
        if length == 1:
            yield from ([None, *rest] for rest in _indices(view, base, dim, place + 1))
    yield from ([start, *rest] for rest in _indices(view, base, dim + 1, place))


def _index_of_view(view: torch.Tensor, base: torch.Tensor) -> tuple[Any, ...] | None:
    """The index with which a basic view was taken from a contiguous tensor: base[index]."""
    if not base.is_contiguous() or base.numel() == 0 or view.numel() == 0:
        return None
    for index in _indices(view, base, 0, 0):
        again = base[tuple(index)]
        same = (again.shape, again.stride(), again.storage_offset())
        if same == (view.shape, view.stride(), view.storage_offset()):
            return tuple(index)
    return None


def _become_view(view: torch.Tensor, value: torch.Tensor, writer: FrameType) -> None:
    """As _become_sharded for a view, `out[k]` in `out[k] += y`, and the tensor it is of."""
    base = view._base
    index = _index_of_view(view, base)
    window = _window(index, base.shape) if index is not None else None
    unseen = _may_change(base, writer, views=1) and view._use_count() == 1
    if _become_sharded(base, window, value, unseen):
        torch._C._swap_tensor_impl(view, base[index])


def _is_mixed(tensor: torch.Tensor, value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or not core.is_sharded(value):
        return False
    return type(tensor) is torch.Tensor and not core.is_sharded(tensor) and not tensor.is_sparse


def _patch_item_writes() -> None:
    stock = torch.Tensor.__setitem__

    @functools.wraps(stock)
    def setitem(self: torch.Tensor, index: Any, value: Any) -> None:
        if _is_mixed(self, value):
            unseen = _may_change(self, sys._getframe(1))
            _become_sharded(self, _window(index, self.shape), value, unseen)
        stock(self, index, value)

    torch.Tensor.__setitem__ = setitem  # type: ignore[method-assign,assignment]


def _patched(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def in_place(self: torch.Tensor, value: Any) -> Any:
        if _is_mixed(self, value):
            writer = sys._getframe(1)
            if self._is_view():
                _become_view(self, value, writer)
            else:
                unseen = _may_change(self, writer)
                _become_sharded(self, _window(..., self.shape), value, unseen)
        return stock(self, value)

    return in_place


def install() -> None:
    """Puts the patches in place; done once at import."""
    _patch_item_writes()
    for name in _IN_PLACE:
        setattr(torch.Tensor, name, _patched(getattr(torch.Tensor, name)))


install()
