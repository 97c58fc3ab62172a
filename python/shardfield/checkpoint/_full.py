"""Checkpoints in one file that need no Shardfield to be read."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch

from shardfield._core import core
from shardfield.checkpoint import _format, _plan, _state
from shardfield.checkpoint._format import CheckpointError, Meta
from shardfield.checkpoint._ranks import Ranks
from shardfield.checkpoint._sharded import STRUCTURE, Progress, Reader, fill, report, sync_folder
from shardfield.distributed._groups import Group, group_mesh


def save_full(
    path: str | os.PathLike[str],
    state: Any,
    *,
    group: Group = None,
    progress: Progress = False,
) -> None:
    """Saves a state whole in one file, gathered tensor by tensor and written by rank 0. Collective.

    `.safetensors` streams: no rank holds more than one whole tensor (and its parts while it is put
    together). Any other name is written with
    torch.save, for which rank 0 holds the whole state in host memory; `torch.load(path,
    weights_only=True)` reads it. An older file of the name stays until the new one is complete.

    Args:
        path: of the file; written by rank 0 only (path and state may change places).
        state: a module, an optimizer, a state_dict, or nested mappings, lists and tuples of these,
            tensors (plain, sharded, DTensor), numbers, strings and None.
        group: the ranks that hold the state together; None for all.
        progress: True for a bar on rank 0 (tqdm), or a function of bytes done and bytes to do.

    Raises:
        CheckpointError: on all ranks: names, shapes or values that differ between ranks, pieces
            that do not fit together, values that cannot be saved, rank 0 cannot write.

    Example:
        >>> save_full("net.safetensors", net)
        >>> plain_net.load_state_dict(safetensors.torch.load_file("net.safetensors"))
    """
    path, state = _state.path_first(path, state)
    ranks = Ranks(group)
    target = Path(path)
    pieces: dict[str, _state.Piece] = {}

    def describe() -> dict[str, Any]:
        tensors: dict[str, torch.Tensor] = {}
        structure = _state.take_apart(state, "", tensors)
        pieces.update({name: _state.piece_of(name, t) for name, t in tensors.items()})
        return {"structure": structure, "manifest": _state.manifest(pieces)}

    _, described = ranks.together(describe, "save_full")
    manifest = described[0]["manifest"]
    sizes = {n: _format.dtype_of(e["dtype"]).itemsize for n, e in manifest.items()}
    owners = _plan.assign_owners([d["manifest"] for d in described], sizes, balanced=False)
    _state.check_same_values([d["structure"] for d in described])
    metas = {n: Meta(e["dtype"], tuple(e["shape"])) for n, e in manifest.items()}

    def work() -> None:
        stream = _whole_tensors(metas, pieces, owners, ranks)
        try:
            if ranks.rank == 0:
                _write(target, metas, described[0]["structure"], stream, progress)
        finally:
            for _ in stream:  # the others' part of each gather, and the rest after an error here
                pass

    ranks.together(work, "save_full: cannot write")


def _whole_tensors(
    metas: Mapping[str, Meta],
    pieces: Mapping[str, _state.Piece],
    owners: Mapping[str, list[tuple[int, _plan.Box]]],
    ranks: Ranks,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and whole tensor, in the order of the file; only rank 0's tensors have content."""
    for name in _format.order(metas):
        local = pieces[name].local
        if all(owner == 0 for owner, _ in owners[name]):
            yield name, local
            continue
        sizes = [0] * ranks.size
        for owner, box in owners[name]:
            sizes[owner] = prod(box[1])
        flat = local.reshape(-1)[: sizes[ranks.rank]]
        mesh = group_mesh(ranks.group, local.device, "save_full")
        parts = core.gather_v(flat, mesh, sizes, 0, 0)
        if ranks.rank != 0:
            yield name, parts
            continue
        whole = torch.empty(metas[name].shape, dtype=local.dtype, device=local.device)
        by_rank = parts.split(sizes)
        for owner, box in owners[name]:
            place = _plan.slices(box, ((0,) * whole.dim(), tuple(whole.shape)))
            whole[place] = by_rank[owner].reshape(box[1])
        del parts, by_rank
        yield name, whole


def _write(
    target: Path,
    metas: Mapping[str, Meta],
    structure: _state.Json,
    stream: Iterator[tuple[str, torch.Tensor]],
    progress: Progress,
) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.tmp-{os.getpid()}")
    advance = report(progress, 0, sum(m.nbytes for m in metas.values()))
    try:
        if target.suffix == ".safetensors":
            extra = {STRUCTURE: json.dumps(structure)}
            _format.write_file(temporary, metas, stream, advance, extra)
        else:
            tensors = {}
            for name, whole in stream:
                tensors[name] = whole.resolve_conj().resolve_neg().cpu().clone()
                advance(whole.nbytes)
            with open(temporary, "wb") as file:
                torch.save(_state.put_together(structure, tensors), file)
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(target.parent)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor where its elements may be read: torch maps a file as it is, also one whose values
    start between two numbers, and then crashes on complex doubles.
    """
    if tensor.data_ptr() % tensor.element_size() == 0:
        return tensor
    content = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).clone()
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    return torch.empty(0, dtype=tensor.dtype).set_(content.untyped_storage(), *place)


class _TorchReader:
    """Boxes of a file of torch.save, mapped into memory; only weights, no other objects."""

    def __init__(self, path: Path) -> None:
        self._tensors: dict[str, torch.Tensor] = {}
        try:
            content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        self.structure = _state.take_apart(content, "", self._tensors)
        self._tensors = {name: _aligned(t) for name, t in self._tensors.items()}
        self.names = list(self._tensors)

    def meta(self, name: str) -> Meta:
        t = self._tensors[name]
        return Meta(_format.dtype_name(t.dtype), tuple(t.shape))

    def read(self, name: str, box: _plan.Box | None = None) -> torch.Tensor:
        t = self._tensors[name]
        if box is None:
            return t.clone()
        return t[_plan.slices(box, ((0,) * t.dim(), tuple(t.shape)))].clone()


def load_full(
    path: str | os.PathLike[str], state: Any = None, *, strict: bool = True, group: Group = None
) -> Any:
    """Loads a file of save_full, torch.save (weights only) or safetensors; each rank reads the ranges
    of its own pieces. Collective over the ranks (they agree on success; no data is exchanged).

    Args:
        path: of a file that all ranks see.
        state: as in save_full: tensors and modules are filled in place, other objects get their
            state by `load_state_dict`. None loads everything plain.
        strict: raise on names that only the file or only `state` has. Entries may be left out of a
            mapping as a whole.
        group: the ranks that load together; None for all.

    Returns:
        The state with the loaded values.

    Raises:
        CheckpointError: on all ranks: a file that is missing, cut off or malformed, names, shapes
            or dtypes that do not fit.
    """
    path, state = _state.path_first(path, state)
    ranks = Ranks(group)
    source = Path(path)
    loaded: list[Any] = []

    def work() -> None:
        if not source.is_file():
            raise CheckpointError(f"{source} does not exist")
        reader = Reader(source) if source.suffix == ".safetensors" else _TorchReader(source)
        loaded.append(fill(reader, state, strict, False, ranks))

    ranks.together(work, "load_full")
    return loaded[0] if state is None else _state.restore(state, loaded[0])
