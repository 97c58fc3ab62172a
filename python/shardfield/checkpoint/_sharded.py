"""Checkpoints in pieces: each rank writes what it owns and reads what it needs.

Folder layout:

    shardfield.index.json          shapes, dtypes, pieces with global offsets, files, values
    <save>-r00000.safetensors      the pieces rank 0 owns, by name
    <save>-r00001.safetensors      ...

A save writes new files beside the old ones, flushes them, and then replaces the index in one
rename; the files of the save before are removed last. Whenever a rank is killed, the index that is
there names complete files.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardfield._core import core
from shardfield.checkpoint import _format, _plan, _state
from shardfield.checkpoint._format import CheckpointError, Meta
from shardfield.checkpoint._ranks import Ranks
from shardfield.distributed._groups import Group

INDEX = "shardfield.index.json"
STRUCTURE = "shardfield.structure"  # the same in the metadata of one file
VERSION = 1
_FILE = re.compile(r"^[0-9a-f]{16}-r\d{5,}\.safetensors$")
_RNG = "shardfield.rng"  # no name that a state of a user's has

Progress = bool | Callable[[int, int], None]


class SaveHandle:
    """A save that goes on in the background."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name="shardfield-save")
        self._thread.start()

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self._error = error

    def done(self) -> bool:
        """True when nothing is being written any more."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Blocks until the checkpoint is complete on all ranks.

        Raises:
            CheckpointError: when a rank could not write.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error


_running: SaveHandle | None = None
_background: weakref.WeakKeyDictionary[Any, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def _with_rng(state: Any) -> Any:
    """The state with this rank's generators, if it has room for another entry."""
    if not isinstance(state, Mapping):
        return state
    if _RNG in state:
        raise CheckpointError(f"save_sharded: the name '{_RNG}' is taken; rename that entry")
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return {**state, _RNG: states}


def _pieces(tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> dict[str, _state.Piece]:
    pieces: dict[str, _state.Piece] = {}
    for name, value in tensors.items():
        piece = _state.piece_of(name, value)
        if name.startswith(f"{_RNG}/"):  # one row per rank
            row = piece.local.reshape(1, -1)
            piece = _state.Piece((ranks.size, row.shape[1]), (ranks.rank, 0), row)
        pieces[name] = piece
    return pieces


def report(progress: Progress, rank: int, total: int) -> Callable[[int], None]:
    """What is called with the bytes of every block: a bar on rank 0, or the user's function."""
    if progress is False or (progress is True and rank != 0):
        return lambda done: None
    if progress is True:
        from tqdm import tqdm

        bar = tqdm(total=total, unit="B", unit_scale=True, desc="checkpoint", leave=False)

        def advance(done: int) -> None:
            bar.update(done)
            if bar.n >= total:
                bar.close()

        return advance
    written = [0]

    def tell(done: int) -> None:
        written[0] += done
        progress(written[0], total)

    return tell


def save_sharded(
    path: str | os.PathLike[str],
    state: Any,
    *,
    rng: bool = True,
    group: Group = None,
    async_op: bool = False,
    progress: Progress = False,
) -> SaveHandle | None:
    """Saves a training state in pieces; each byte is written once, by one rank. Collective.

    A checkpoint that is in the folder already stays loadable until the new one is complete.

    Args:
        path: folder that all ranks see (path and state may change places).
        state: nested mappings, lists and tuples of tensors (plain: equal on all ranks, sharded,
            DTensor), numbers, strings, None, and objects with a state_dict: modules, optimizers,
            schedulers. The names and the values that are no tensors must be equal on all ranks.
        rng: also save the random generators of every rank, beside the entries of a mapping.
        group: the ranks that save together; None for all.
        async_op: copy the pieces to the host and return; a thread writes.
        progress: True for a bar on rank 0 (tqdm), or a function of bytes done and bytes to do.

    Returns:
        With async_op a handle; `wait()` before relying on the files.

    Raises:
        CheckpointError: on all ranks: names, shapes or values that differ between ranks, pieces
            that do not fit together, values that cannot be saved, a rank that cannot write.

    Example:
        >>> save_sharded("run/last", {"model": net, "optimizer": optimizer, "step": step})
    """
    global _running
    before, _running = _running, None
    if before is not None:
        before.wait()
    path, state = _state.path_first(path, state)
    ranks = Ranks(group)
    folder = Path(path)

    def describe() -> dict[str, Any]:
        tensors: dict[str, torch.Tensor] = {}
        structure = _state.take_apart(_with_rng(state) if rng else state, "", tensors)
        pieces.update(_pieces(tensors, ranks))
        folder.mkdir(parents=True, exist_ok=True)
        return {"structure": structure, "manifest": _state.manifest(pieces)}

    pieces: dict[str, _state.Piece] = {}
    _, described = ranks.together(describe, "save_sharded")
    manifests = [d["manifest"] for d in described]
    sizes = {n: _format.dtype_of(e["dtype"]).itemsize for n, e in manifests[0].items()}
    owners = _plan.assign_owners(manifests, sizes)
    _state.check_same_values([d["structure"] for d in described])
    token = ranks.all_gather_json(uuid.uuid4().hex[:16])[0]
    mine = {
        name: pieces[name].local
        for name, parts in owners.items()
        for owner, _ in parts
        if owner == ranks.rank
    }
    job = _Save(folder, token, described[0]["structure"], manifests[0], owners, progress)
    if not async_op:
        job.write(mine, ranks)
        return None
    staged = {name: t.detach().cpu().clone() for name, t in mine.items()}
    behind = _background_ranks(ranks)
    _running = SaveHandle(lambda: job.write(staged, behind))
    return _running


def _background_ranks(ranks: Ranks) -> Ranks:
    """The same ranks over a group of their own: the thread's messages must not meet the program's.
    Collective over the ranks at first use.
    """
    if ranks.group is None:
        return ranks
    if ranks.group not in _background:
        members = dist.get_process_group_ranks(ranks.group)
        # torch names a group by how many there are: where ranks have made different ones, the
        # members of a new group would wait for each other under different names.
        alone = len(members) < dist.get_world_size()
        world = dist.distributed_c10d._world
        counts = ranks.all_gather_json(len(world.pg_names) if alone else world.group_count)
        if len(set(counts)) > 1:
            raise CheckpointError(
                f"save_sharded: the ranks have made different process groups ({counts} by rank), so "
                "that none can be made for the background; save with async_op=False"
            )
        _background[ranks.group] = dist.new_group(
            members, backend="gloo", use_local_synchronization=alone
        )
    return Ranks(_background[ranks.group])


class _Save:
    """One save once it is planned."""

    def __init__(
        self,
        folder: Path,
        token: str,
        structure: _state.Json,
        manifest: _plan.Manifest,
        owners: Mapping[str, list[tuple[int, _plan.Box]]],
        progress: Progress,
    ) -> None:
        self.folder, self.token, self.structure = folder, token, structure
        self.manifest, self.owners, self.progress = manifest, owners, progress

    def _file(self, rank: int) -> str:
        return f"{self.token}-r{rank:05d}.safetensors"

    def _metas(self, rank: int) -> dict[str, Meta]:
        return {
            name: Meta(self.manifest[name]["dtype"], box[1])
            for name, parts in self.owners.items()
            for owner, box in parts
            if owner == rank
        }

    def write(self, tensors: Mapping[str, torch.Tensor], ranks: Ranks) -> None:
        """Writes this rank's file, and on rank 0 the index. Collective over the ranks."""
        metas = self._metas(ranks.rank)
        total = sum(m.nbytes for m in metas.values())

        def write_mine() -> dict[str, list[str]]:
            if not metas:
                return {}
            return _format.write_file(
                self.folder / self._file(ranks.rank),
                metas,
                ((name, tensors[name]) for name in _format.order(metas)),
                report(self.progress, ranks.rank, total),
            )

        try:
            _, hashes = ranks.together(write_mine, "save_sharded: cannot write")
            ranks.together(
                lambda: self._commit(hashes) if ranks.rank == 0 else None,
                "save_sharded: cannot write the index",
            )
        except CheckpointError:
            (self.folder / self._file(ranks.rank)).unlink(missing_ok=True)
            raise

    def _commit(self, hashes: list[dict[str, list[str]]]) -> None:
        begins = {r: _format.layout(self._metas(r))[1] for r in range(len(hashes))}
        tensors = {}
        for name, parts in sorted(self.owners.items()):
            entry = self.manifest[name]
            tensors[name] = {
                "shape": entry["shape"],
                "dtype": entry["dtype"],
                "pieces": [
                    {
                        "file": self._file(owner),
                        "begin": begins[owner][name],
                        "offset": list(box[0]),
                        "shape": list(box[1]),
                        "sha256": hashes[owner][name],
                    }
                    for owner, box in parts
                ],
            }
        body = {
            "format": "shardfield-sharded",
            "version": VERSION,
            "save": self.token,
            "ranks": len(hashes),
            "block_bytes": _format.BLOCK_BYTES,
            "structure": self.structure,
            "tensors": tensors,
        }
        replace_file(self.folder / INDEX, index_bytes(body))
        for old in self.folder.iterdir():
            left = _FILE.match(old.name) and not old.name.startswith(self.token)
            if left or old.name.startswith(f"{INDEX}.tmp-"):  # of a save before, or a killed one
                old.unlink(missing_ok=True)


def index_bytes(body: Any) -> bytes:
    """The index file: its hash is that of the very bytes of "index"."""
    text = json.dumps(body).encode()
    digest = hashlib.sha256(text).hexdigest().encode()
    return b'{"sha256": "' + digest + b'", "index": ' + text + b"}"


def replace_file(path: Path, content: bytes) -> None:
    """Writes a file so that at any moment either the old or the new content is there."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    with open(temporary, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes a rename inside a folder last."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class Reader:
    """Reads boxes of the tensors of a checkpoint folder or a safetensors file. Local.

    Args:
        path: the folder, or a file that ends in .safetensors.
        verify: compare the hashes of the blocks that are read (folders have them).

    Raises:
        CheckpointError: no checkpoint, one that is malformed or cut off, or of a later version.
    """

    def __init__(self, path: str | os.PathLike[str], verify: bool = True) -> None:
        source = Path(path)
        if source.suffix != ".safetensors" and not (source / INDEX).is_file():
            raise CheckpointError(f"{source} holds no checkpoint ({INDEX} is missing)")
        with _as_checkpoint_error():
            self._reader = core.CheckpointReader(str(source), verify)

    @property
    def names(self) -> list[str]:
        """Names of all tensors."""
        return self._reader.names()

    @property
    def save(self) -> str:
        """Which save wrote the folder."""
        return self._reader.save

    @property
    def structure(self) -> Any:
        """The nested values, tensors by name."""
        text = self._reader.structure or self._reader.metadata.get(STRUCTURE)
        if text:
            return json.loads(text)
        return {"dict": [[name, {"tensor": name}] for name in self.names]}

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors handed out so far."""
        return self._reader.bytes_read

    def meta(self, name: str) -> Meta:
        """Shape and dtype of a tensor."""
        dtype = _format.dtype_name(self._reader.dtype(name))
        return Meta(dtype, tuple(self._reader.shape(name)))

    def read(self, name: str, box: _plan.Box | None = None) -> torch.Tensor:
        """The elements of a box (offset, shape) of a tensor; the whole tensor without one.

        Raises:
            CheckpointError: files that are cut off or damaged.
        """
        offset, shape = (None, ()) if box is None else box
        with _as_checkpoint_error():
            return self._reader.read(name, offset, shape)


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(str(error)) from None


def load_sharded(
    path: str | os.PathLike[str],
    state: Any = None,
    *,
    rng: bool = True,
    strict: bool = True,
    verify: bool = True,
    group: Group = None,
) -> Any:
    """Loads what save_sharded wrote, on any number of ranks, mesh, placement and piece sizes.

    Every rank reads only the ranges of its own pieces. Collective over the ranks (they agree on the
    checkpoint and on success; no data is exchanged).

    Args:
        path: the folder.
        state: as in save_sharded. Tensors are filled in place, modules too; optimizers, schedulers
            and other objects get their state by `load_state_dict`. None loads everything plain.
        rng: set this rank's random generators. With as many ranks as saved each gets its own, else
            all get rank 0's.
        strict: raise on names that only the checkpoint or only `state` has. Entries may be left
            out of `state` as a whole. Without it, what the checkpoint lacks stays as it is.
        verify: compare the hashes of the blocks that are read.
        group: the ranks that load together; None for all.

    Returns:
        The state with the loaded values: `load_sharded(path, state)["step"]`.

    Raises:
        CheckpointError: on all ranks: no checkpoint, a damaged one, names, shapes or dtypes that do
            not fit.
    """
    path, state = _state.path_first(path, state)
    ranks = Ranks(group)
    loaded: list[Any] = []

    def work() -> str:
        reader = Reader(path, verify)
        loaded.append(fill(reader, state, strict, rng, ranks))
        return reader.save

    _, saves = ranks.together(work, "load_sharded")
    if len(set(saves)) > 1:
        raise CheckpointError(
            f"load_sharded: the ranks see different checkpoints in {path} ({saves}); is it one "
            "file system, and is nobody saving?"
        )
    return loaded[0] if state is None else _state.restore(state, loaded[0])


def fill(reader: Any, state: Any, strict: bool, rng: bool, ranks: Ranks) -> Any:
    found: dict[str, torch.Tensor] = {}
    _state.templates({} if state is None else state, "", found)
    names = [n for n in reader.names if not n.startswith(f"{_RNG}/")]
    if state is not None and strict:
        _check_names(names, found, not isinstance(state, Mapping))
    tensors: dict[str, torch.Tensor] = {}
    for name in reader.names:
        if name not in names:
            tensors[name] = _rng_row(reader, name, ranks)
            continue
        meta = reader.meta(name)
        target = _state.template_for(name, meta.shape, _format.dtype_of(meta.dtype), found)
        tensors[name] = reader.read(name) if target is None else _read_into(reader, name, target)
    value = _state.put_together(reader.structure, tensors)
    if state is not None and strict:
        _state.check_entries(state, value)
    if isinstance(value, dict):
        value.pop(_RNG, None)
    if rng and f"{_RNG}/cpu" in tensors:
        torch.set_rng_state(tensors[f"{_RNG}/cpu"])
        if f"{_RNG}/cuda" in tensors and torch.cuda.is_available():
            torch.cuda.set_rng_state(tensors[f"{_RNG}/cuda"])
    return value


def _check_names(saved: list[str], found: Mapping[str, torch.Tensor], whole: bool) -> None:
    """Raises on names that one side lacks. Entries of a mapping may be left out as a whole (the
    optimizer, say), unless `whole`.
    """
    of_parameters = tuple(name[:-1] for name in found if name.endswith("/*"))
    exact = {name for name in found if not name.endswith("/*")}
    entries = {name.partition("/")[0] for name in found}
    only_state = sorted(exact - set(saved))
    only_file = [
        name
        for name in saved
        if name not in exact
        and not name.startswith(of_parameters)
        and "/param_groups/" not in name
        and (whole or name.partition("/")[0] in entries)
    ]
    if only_state or only_file:
        raise CheckpointError(
            f"names differ: only in the state {only_state}, only in the checkpoint {only_file}; "
            "pass strict=False to load what both have"
        )


def _read_into(reader: Any, name: str, target: torch.Tensor) -> torch.Tensor:
    meta = reader.meta(name)
    if tuple(target.shape) != meta.shape or _format.dtype_name(target.dtype) != meta.dtype:
        raise CheckpointError(
            f"'{name}' is {meta.dtype} {list(meta.shape)} in the checkpoint, the state expects "
            f"{_format.dtype_name(target.dtype)} {list(target.shape)}"
        )
    piece = _state.piece_of(name, target)
    if prod(piece.local.shape):
        with torch.no_grad():
            piece.local.copy_(reader.read(name, piece.box))
    return target


def _rng_row(reader: Any, name: str, ranks: Ranks) -> torch.Tensor:
    rows, length = reader.meta(name).shape
    row = ranks.rank if rows == ranks.size else 0
    return reader.read(name, ((row, 0), (1, length))).reshape(-1)


__all__ = ["Reader", "SaveHandle", "load_sharded", "save_sharded"]
