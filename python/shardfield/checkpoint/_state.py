"""What is saved: nested values, taken apart into a JSON structure and named tensors, and back."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from shardfield._core import core
from shardfield.checkpoint._format import CheckpointError, dtype_name

Json = Any


@dataclass
class Piece:
    """This rank's box of a tensor."""

    shape: tuple[int, ...]  # of the whole tensor
    offset: tuple[int, ...]
    local: torch.Tensor

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offset and shape of the piece."""
        return self.offset, tuple(self.local.shape)


def piece_of(name: str, value: torch.Tensor) -> Piece:
    """This rank's box of a plain, sharded or DTensor value. Local.

    Raises:
        CheckpointError: pieces that are no boxes, or partial sums.
    """
    value = value.detach()
    shape = tuple(value.shape)
    if value.is_quantized or value.is_meta or value.layout != torch.strided:
        kind = "meta" if value.is_meta else "quantized" if value.is_quantized else value.layout
        raise CheckpointError(f"checkpoint: '{name}' is a {kind} tensor; save a dense one")
    if core.is_sharded(value):
        dims = [dim for dim, _, _ in core.cuts(value)]
        whole = all(sum(sizes) == shape[dim] for dim, _, sizes in core.cuts(value))
        if len(set(dims)) != len(dims) or not whole:
            raise CheckpointError(
                f"checkpoint: '{name}' is cut inside a merged dim; redistribute it to Shard placements first"
            )
        return Piece(shape, tuple(core.offsets(value)), core.local(value))
    if isinstance(value, DTensor):
        if any(isinstance(p, Partial) for p in value.placements):
            raise CheckpointError(f"checkpoint: '{name}' is a partial sum; redistribute it first")
        local_shape, offset = compute_local_shape_and_global_offset(
            value.shape, value.device_mesh, value.placements
        )
        local = value.to_local()
        if prod(local_shape) == 0:
            return Piece(shape, (0,) * len(shape), local.new_empty(tuple(local_shape)))
        return Piece(shape, tuple(offset), local)
    return Piece(shape, (0,) * len(shape), value)


def manifest(pieces: Mapping[str, Piece]) -> dict[str, dict[str, Any]]:
    """What the ranks tell each other about their pieces."""
    return {
        name: {
            "shape": list(p.shape),
            "dtype": dtype_name(p.local.dtype),
            "offset": list(p.offset),
            "piece": list(p.local.shape),
        }
        for name, p in pieces.items()
    }


def path_first(path: Any, state: Any) -> tuple[Any, Any]:
    """The two in this order, whichever way round they came: torch.save takes the object first.

    Raises:
        TypeError: neither is a path.
    """
    if isinstance(path, (str, os.PathLike)):
        return path, state
    if isinstance(state, (str, os.PathLike)):
        return state, path
    raise TypeError(
        f"checkpoint: expected a path and a state, got {type(path).__name__} and {type(state).__name__}"
    )


def is_stateful(value: Any) -> bool:
    """True for modules, optimizers, schedulers and whatever else has a state_dict."""
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def joined(path: str, key: Any) -> str:
    """The name of an entry: "model/layer.weight"."""
    part = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{part}" if path else part


def take_apart(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Json:
    """The JSON structure of a nested value; its tensors are added to `tensors` by name.

    Raises:
        CheckpointError: a value that JSON cannot hold. Nothing is pickled.
    """
    if isinstance(value, torch.Tensor):
        if path in tensors:
            raise CheckpointError(
                f"checkpoint: two entries are named '{path}'; rename one (a number and its text, 1 and "
                "'1', are one name)"
            )
        tensors[path] = value
        return {"tensor": path}
    if is_stateful(value):
        return take_apart(value.state_dict(), path, tensors)
    if isinstance(value, Mapping):
        kind = "counter" if isinstance(value, Counter) else "dict"
        entries = []
        for key, item in value.items():
            if not isinstance(key, (str, int)):
                raise CheckpointError(
                    f"checkpoint: the key {key!r} of '{path}' is neither str nor int"
                )
            entries.append([checked_text(key, path), take_apart(item, joined(path, key), tensors)])
        return {kind: entries}
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [take_apart(item, joined(path, i), tensors) for i, item in enumerate(value)]}
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}  # JSON has no word for it
    if isinstance(value, int) and not -(2**63) <= value < 2**63:
        return {"int": str(int(value))}  # readers of JSON make it a float
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": checked_text(value, path)}
    raise CheckpointError(
        f"checkpoint: '{path}' is a {type(value).__name__}; only tensors, numbers, strings, None, "
        "lists, tuples, mappings and objects with a state_dict can be saved (nothing is pickled)"
    )


def checked_text(value: Any, path: str) -> Any:
    """The value, unless it is a text that files cannot hold.

    Raises:
        CheckpointError: half of a surrogate pair, which is no character.
    """
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise CheckpointError(
                f"checkpoint: {value!a} of '{path}' is no text: {error.reason}; write it otherwise"
            ) from None
    return value


def check_same_values(structures: Sequence[Json]) -> None:
    """Raises when the ranks' structures differ: rank 0's is the one that is saved.

    Raises:
        CheckpointError: with the ranks that differ.
    """
    texts = [json.dumps(structure) for structure in structures]
    differing = [r for r, text in enumerate(texts) if text != texts[0]]
    if differing:
        raise CheckpointError(
            f"checkpoint: ranks {differing} hold other values than rank 0 (numbers, strings or "
            "lists); make them equal, or leave them out"
        )


def put_together(structure: Json, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The nested value of a structure.

    Raises:
        CheckpointError: a structure that is none.
    """
    if isinstance(structure, dict) and len(structure) == 1:
        ((kind, content),) = structure.items()
        if kind == "tensor":
            return tensors[content]
        if kind == "value":
            return content
        if kind in ("float", "int"):
            return float(content) if kind == "float" else whole_number(content)
        if kind in ("dict", "counter"):
            made = {key: put_together(item, tensors) for key, item in content}
            return Counter(made) if kind == "counter" else made
        if kind in ("list", "tuple"):
            items = [put_together(item, tensors) for item in content]
            return items if kind == "list" else tuple(items)
    raise CheckpointError(f"checkpoint: malformed structure {str(structure)[:80]}")


def whole_number(text: str) -> int:
    """A number beyond 64 bits.

    Raises:
        CheckpointError: anything else; Python takes long for thousands of digits.
    """
    if not isinstance(text, str) or not re.fullmatch(r"-?[0-9]{1,4000}", text):
        raise CheckpointError(f"checkpoint: expected a whole number, got {str(text)[:80]!r}")
    return int(text)


def templates(state: Any, path: str, found: dict[str, torch.Tensor]) -> None:
    """The tensors that loading fills, by name. An optimizer's are not there before its first step:
    those of a parameter's shape are laid out like the parameter.
    """
    if isinstance(state, torch.Tensor):
        found[path] = state
    elif isinstance(state, torch.optim.Optimizer):
        parameters = [p for group in state.param_groups for p in group["params"]]
        for i, p in enumerate(parameters):
            found[joined(joined(path, "state"), i) + "/*"] = p
    elif is_stateful(state):
        templates(state.state_dict(), path, found)
    elif isinstance(state, Mapping):
        for key, item in state.items():
            templates(item, joined(path, key), found)
    elif isinstance(state, (list, tuple)):
        for i, item in enumerate(state):
            templates(item, joined(path, i), found)


def template_for(
    name: str, shape: tuple[int, ...], dtype: torch.dtype, found: Mapping[str, torch.Tensor]
) -> torch.Tensor | None:
    """The tensor to fill for a saved name: the user's own, a new one cut like the parameter it
    belongs to, or None for a plain one.
    """
    if name in found:
        return found[name]
    like = found.get(name.rpartition("/")[0] + "/*")
    if like is None or tuple(like.shape) != shape:
        return None
    return torch.empty_like(like.detach(), dtype=dtype)


def check_entries(state: Any, loaded: Any, path: str = "") -> None:
    """Raises where `state` has an entry or an object that the loaded values lack. Tensors are checked by
    name elsewhere.

    Raises:
        CheckpointError: naming the entries, or the list whose objects are of another number.
    """
    if isinstance(state, torch.Tensor):
        return
    if isinstance(state, Mapping) or is_stateful(state):
        missing = [] if isinstance(loaded, Mapping) else [path]
        if not missing and not is_stateful(state):
            missing = [joined(path, key) for key in state if key not in loaded]
        if missing:
            raise CheckpointError(
                f"names differ: only in the state {missing}; pass strict=False to load what both have"
            )
        for key, item in ({} if is_stateful(state) else state).items():
            check_entries(item, loaded[key], joined(path, key))
    elif isinstance(state, (list, tuple)) and any(map(_holds_objects, state)):
        length = len(loaded) if isinstance(loaded, (list, tuple)) else 0
        if length != len(state):
            raise CheckpointError(
                f"names differ: '{path}' has {len(state)} entries in the state, {length} in the checkpoint"
            )
        for i, item in enumerate(state):
            check_entries(item, loaded[i], joined(path, i))


def _holds_objects(value: Any) -> bool:
    """True for what is filled or loads its state by itself, and for what holds such."""
    if isinstance(value, Mapping):
        return any(map(_holds_objects, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_objects, value))
    return isinstance(value, torch.Tensor) or is_stateful(value)


def restore(state: Any, loaded: Any) -> Any:
    """Hands loaded values back: objects with a state_dict load theirs, everything else is returned.
    Tensors of modules have been filled in place already.
    """
    if isinstance(state, torch.nn.Module):
        extra = {k: v for k, v in loaded.items() if not isinstance(v, torch.Tensor)}
        if extra:
            state.load_state_dict(extra, strict=False)
        return state
    if is_stateful(state):
        state.load_state_dict(loaded)
        return state
    if isinstance(state, Mapping) and isinstance(loaded, Mapping):
        own = {k: v for k, v in state.items() if k not in loaded}
        return {**{k: restore(state.get(k), v) for k, v in loaded.items()}, **own}
    if isinstance(state, (list, tuple)) and isinstance(loaded, (list, tuple)):
        known = len(state)
        return type(loaded)(restore(state[i], v) if i < known else v for i, v in enumerate(loaded))
    return loaded
