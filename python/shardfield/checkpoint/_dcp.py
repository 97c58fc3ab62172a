"""Checkpoints of torch.distributed.checkpoint, read into plain, sharded and DTensor states."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorStorageMetadata,
)

from shardfield.checkpoint import _state
from shardfield.checkpoint._format import CheckpointError
from shardfield.checkpoint._ranks import Ranks
from shardfield.distributed._groups import Group


class _Box(torch.Tensor):
    """This rank's piece of a tensor, by the protocol that torch asks of cut tensors."""

    _piece: _state.Piece

    @staticmethod
    def of(piece: _state.Piece) -> _Box:
        box = torch.Tensor._make_wrapper_subclass(_Box, piece.shape, dtype=piece.local.dtype)
        box._piece = piece
        return box

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> torch.Tensor:
        raise NotImplementedError(f"load_dcp: {func} on a box that is only read into")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        offset, shape = self._piece.box
        return [ChunkStorageMetadata(offsets=torch.Size(offset), sizes=torch.Size(shape))]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        del index
        return self._piece.local


def load_dcp(
    path: str | os.PathLike[str],
    state: Any,
    *,
    allow_pickle: bool = False,
    group: Group = None,
) -> Any:
    """Fills a state from a checkpoint that torch.distributed.checkpoint wrote. Collective over the
    ranks (they agree on success); each rank reads the ranges of its own pieces.

    Args:
        path: the folder that `torch.distributed.checkpoint.save` wrote.
        state: nested mappings and lists of tensors (plain, sharded, DTensor), numbers, strings, and
            objects with a state_dict, with the names that were saved. Filled in place. An optimizer
            is saved as its `state_dict()`; where the state is keyed by parameters' names, pass what
            `get_optimizer_state_dict` gives.
        allow_pickle: torch keeps these checkpoints' metadata as a pickle, which may run any code
            while it is read. Say True only for files you trust.
        group: the ranks that load together; None for all.

    Returns:
        The state.

    Raises:
        CheckpointError: on all ranks: without allow_pickle, no checkpoint, names or shapes that do
            not fit.

    Example:
        >>> load_dcp("old_run/step_100", {"model": net, "step": 0}, allow_pickle=True)
    """
    if not allow_pickle:
        raise CheckpointError(
            "load_dcp: the metadata of torch.distributed.checkpoint is a pickle, which may run any "
            "code; pass allow_pickle=True for files you trust"
        )
    ranks = Ranks(group)
    loaded: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}

    def work() -> None:
        if not (Path(path) / ".metadata").is_file():
            raise CheckpointError(f"{path} holds no checkpoint of torch (.metadata is missing)")
        metadata = dcp.FileSystemReader(str(path)).read_metadata()
        paths.update(metadata.planner_data or {})
        loaded.update(_targets(state, metadata))
        boxes: dict[str, Any] = {}
        for name, value in loaded.items():
            if not isinstance(value, torch.Tensor):
                boxes[name] = value
                continue
            piece = _state.piece_of(name, value)
            if prod(piece.local.shape):
                boxes[name] = _Box.of(piece)
        try:
            with torch.no_grad():
                dcp.load(boxes, checkpoint_id=str(path), no_dist=True)
        except CheckpointException as error:  # no Exception: it would pass by the other ranks
            reasons = [str(reason) for reason, _ in error.failures.values()]
            raise CheckpointError("; ".join(reasons)) from None
        loaded.update((n, v) for n, v in boxes.items() if not isinstance(v, torch.Tensor))

    ranks.together(work, "load_dcp")
    return _restored(state, "", loaded, paths)


def _leaves(state: Any, name: str, saved: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names and values that are asked for: tensors and numbers by name, objects as a whole."""
    if isinstance(state, torch.nn.Module):
        state = {k: v for k, v in state.state_dict().items() if isinstance(v, torch.Tensor)}
    nested = isinstance(state, (Mapping, list, tuple)) and name not in saved
    if not nested or not state:
        yield name, state
        return
    items = state.items() if isinstance(state, Mapping) else enumerate(state)
    for key, item in items:
        yield from _leaves(item, f"{name}.{key}" if name else str(key), saved)


def _targets(state: Any, metadata: Metadata) -> dict[str, Any]:
    """What is read, by the checkpoint's names: tensors to fill, and None for what is no tensor.

    Raises:
        CheckpointError: names that the checkpoint lacks.
    """
    saved = metadata.state_dict_metadata
    targets: dict[str, Any] = {}
    missing = []
    for name, value in _leaves(state, "", saved):
        if _state.is_stateful(value):
            parts = [n for n in saved if n.startswith(f"{name}.")]
            targets |= {n: _template(n, name, value, saved[n]) for n in parts}
        else:
            parts = [name] if name in saved else []
            targets |= {n: value if isinstance(value, torch.Tensor) else None for n in parts}
        if not parts and value not in ({}, [], ()):
            missing.append(name)
    if missing:
        raise CheckpointError(f"names differ: only in the state {sorted(missing)}")
    return targets


def _template(name: str, prefix: str, value: Any, saved: Any) -> torch.Tensor | None:
    """A tensor for one entry of an object's state: cut like the parameter it belongs to, or plain."""
    if not isinstance(saved, TensorStorageMetadata):
        return None
    if isinstance(value, torch.optim.Optimizer):
        parameters = [p for group in value.param_groups for p in group["params"]]
        found = {f"{prefix}/state/{i}/*": p for i, p in enumerate(parameters)}
        entry = prefix + name.removeprefix(prefix).replace(".", "/", 3)
        like = _state.template_for(entry, tuple(saved.size), saved.properties.dtype, found)
        if like is not None:
            return like
    return torch.empty(saved.size, dtype=saved.properties.dtype)


def _restored(
    state: Any, name: str, loaded: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]
) -> Any:
    """The state with the loaded values; mappings and lists are filled in place."""
    if isinstance(state, (torch.Tensor, torch.nn.Module)):
        return state
    if name in loaded:
        return loaded[name]
    if _state.is_stateful(state):
        state.load_state_dict(_own_state(state, name, loaded, paths))
        return state
    if isinstance(state, Mapping):
        made = {
            k: _restored(v, f"{name}.{k}" if name else str(k), loaded, paths)
            for k, v in state.items()
        }
        if isinstance(state, MutableMapping):
            state.update(made)
            return state
        return made
    if isinstance(state, (list, tuple)):
        items = [_restored(v, f"{name}.{i}", loaded, paths) for i, v in enumerate(state)]
        if isinstance(state, list):
            state[:] = items
            return state
        return tuple(items)
    return state


def _own_state(
    state: Any, name: str, loaded: Mapping[str, Any], paths: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """The state_dict of one object: nested as it was saved; parameters of optimizers by number."""
    root: dict[str, Any] = {}
    depth = name.count(".") + 1
    for entry, value in loaded.items():
        if entry.startswith(f"{name}."):
            path = paths.get(entry) or tuple(entry.split("."))
            set_element(root, tuple(path[depth:]), value)
    if isinstance(state, torch.optim.Optimizer):
        entries = root.get("state", {})
        named = [k for k in entries if not str(k).isdigit()]
        if named or "param_groups" not in root:
            raise CheckpointError(
                f"load_dcp: the optimizer '{name}' was saved by parameters' names ({named[:1]}); pass what "
                "torch's get_optimizer_state_dict(model, optimizer) gives, then set_optimizer_state_dict"
            )
        root["state"] = {int(k): v for k, v in entries.items()}
    return root


__all__ = ["load_dcp"]
