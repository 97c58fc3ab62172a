"""Safetensors files: written in one pass with hashes, read by range through a memory map.

A file is 8 bytes of little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, and the tensors' bytes one after the other. Everything read from a file is checked
against its size before it is used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

BLOCK_BYTES = 4 << 20
MAX_HEADER_BYTES = 100_000_000  # what the safetensors library accepts

NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.uint16: "U16",
    torch.int32: "I32",
    torch.uint32: "U32",
    torch.int64: "I64",
    torch.uint64: "U64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.complex64: "C64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}
# The format has no 128-bit complex numbers: they travel as pairs, named in the metadata.
PAIRED = {"C128": torch.complex128}
_PAIRS = "shardfield.pairs"
_WORDS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64, 16: np.complex128}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read, with the reason."""


@dataclass(frozen=True)
class Meta:
    """Shape and dtype of a tensor in a file."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return dtype_of(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return prod(self.shape) * self.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype in files.

    Raises:
        CheckpointError: a dtype that files cannot hold.
    """
    if dtype == torch.complex128:
        return "C128"
    if dtype not in NAMES:
        raise CheckpointError(
            f"checkpoint: {dtype} has no place in safetensors files; convert it first"
        )
    return NAMES[dtype]


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name in a file."""
    dtype = DTYPES.get(name) or PAIRED.get(name)
    if dtype is None:
        raise CheckpointError(f"checkpoint: unknown dtype '{name}' in the file")
    return dtype


def raw_bytes(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's elements in row-major order as bytes."""
    t = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return t.reshape(-1).view(torch.uint8).numpy()


def order(metas: Mapping[str, Meta]) -> list[str]:
    """The order of the tensors in a file: wide dtypes first, so that all are aligned."""
    return sorted(metas, key=lambda n: (-metas[n].itemsize, n))


def layout(
    metas: Mapping[str, Meta], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The header of a file and each tensor's first byte in it."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    pairs = [name for name in order(metas) if metas[name].dtype in PAIRED]
    if pairs:
        header["__metadata__"][_PAIRS] = json.dumps(pairs)
    begins: dict[str, int] = {}
    at = 0
    for name in order(metas):
        meta = metas[name]
        paired = meta.dtype in PAIRED
        header[name] = {
            "dtype": "F64" if paired else meta.dtype,
            "shape": [*meta.shape, 2] if paired else list(meta.shape),
            "data_offsets": [at, at + meta.nbytes],
        }
        begins[name] = at
        at += meta.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, {
        name: begin + 8 + len(text) for name, begin in begins.items()
    }


def write_file(
    path: Path,
    metas: Mapping[str, Meta],
    tensors: Iterable[tuple[str, torch.Tensor]],
    progress: Callable[[int], None] = lambda done: None,
    metadata: Mapping[str, str] | None = None,
) -> dict[str, list[str]]:
    """Writes a file to disk (flushed) in one pass.

    Args:
        path: of the new file.
        metas: of every tensor.
        tensors: name and values, in the order of `order(metas)`.
        progress: called with the bytes of each block written.
        metadata: of the whole file.

    Returns:
        SHA-256 of each block of 4 MiB of each tensor.
    """
    header, begins = layout(metas, metadata)
    hashes: dict[str, list[str]] = {}
    with open(path, "wb") as file:
        file.write(header)
        for name, tensor in tensors:
            if file.tell() != begins[name]:
                raise CheckpointError(f"{path}: '{name}' came out of order")
            data = raw_bytes(tensor)
            hashes[name] = []
            for start in range(0, data.size, BLOCK_BYTES):
                block = data[start : start + BLOCK_BYTES].data
                hashes[name].append(hashlib.sha256(block).hexdigest())
                file.write(block)
                progress(block.nbytes)
        file.flush()
        os.fsync(file.fileno())
    return hashes


def read_header(path: Path) -> tuple[dict[str, tuple[Meta, int]], dict[str, str]]:
    """Shapes, dtypes and first bytes of a safetensors file's tensors, checked, and its metadata.

    Raises:
        CheckpointError: a file that is cut off or not of this format.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: not a safetensors file, or cut off in its header")
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path}: its header is no JSON: {error}") from None
    found: dict[str, tuple[Meta, int]] = {}
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else {}
    try:
        for name, entry in header.items():
            meta = Meta(entry["dtype"], tuple(entry["shape"]))
            begin, end = entry["data_offsets"]
            if min((0, *meta.shape)) < 0 or begin < 0 or begin + meta.nbytes != end:
                raise CheckpointError(f"{path}: '{name}' has offsets that do not fit its shape")
            if 8 + length + end > size:
                raise CheckpointError(f"{path}: cut off inside '{name}'")
            found[name] = (meta, 8 + length + begin)
        for name in json.loads(metadata.get(_PAIRS, "[]")):
            meta, begin = found[name]
            if meta.dtype != "F64" or not meta.shape or meta.shape[-1] != 2:
                raise CheckpointError(f"{path}: '{name}' is said to be complex and is not")
            found[name] = (Meta("C128", meta.shape[:-1]), begin)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: its header is malformed: {error!r}") from None
    return found, metadata


class RangeReader:
    """Reads boxes of tensors from memory-mapped files, checking the blocks it touches."""

    def __init__(self, verify: bool = True) -> None:
        self._verify = verify
        self._maps: dict[Path, np.ndarray] = {}
        self._good: set[tuple[Path, int]] = set()
        self.bytes_read = 0

    def read(
        self,
        path: Path,
        begin: int,
        meta: Meta,
        box: Sequence[slice],
        hashes: Sequence[str] = (),
    ) -> torch.Tensor:
        """The elements of a box of a tensor that starts at byte `begin` of a file.

        Raises:
            CheckpointError: the file is shorter than it should be, or a hash differs.
        """
        if path not in self._maps:
            try:
                self._maps[path] = np.memmap(path, dtype=np.uint8, mode="r")
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{path}: cannot be read: {error}") from None
        file = self._maps[path]
        if begin < 0 or begin + meta.nbytes > file.size:
            raise CheckpointError(
                f"{path}: expected at least {begin + meta.nbytes} bytes, got {file.size}; it is cut off"
            )
        if self._verify and hashes:
            self._check_blocks(path, file[begin : begin + meta.nbytes], begin, meta, box, hashes)
        word = np.dtype(_WORDS[meta.itemsize])
        whole = file[begin : begin + meta.nbytes].view(word).reshape(meta.shape)
        part = np.array(whole[tuple(box)], order="C", copy=True)
        self.bytes_read += part.nbytes
        return torch.from_numpy(part).view(dtype_of(meta.dtype))

    def _check_blocks(
        self,
        path: Path,
        data: np.ndarray,
        begin: int,
        meta: Meta,
        box: Sequence[slice],
        hashes: Sequence[str],
    ) -> None:
        first, last, stride = 0, 0, meta.itemsize
        for s, n in zip(reversed(box), reversed(meta.shape), strict=True):
            if s.stop <= s.start:
                return
            first += s.start * stride
            last += (s.stop - 1) * stride
            stride *= n
        for block in range(first // BLOCK_BYTES, last // BLOCK_BYTES + 1):
            if (path, begin + block * BLOCK_BYTES) in self._good:
                continue
            part = data[block * BLOCK_BYTES : (block + 1) * BLOCK_BYTES]
            if block >= len(hashes) or hashlib.sha256(part.data).hexdigest() != hashes[block]:
                raise CheckpointError(
                    f"{path}: the content of bytes {begin + block * BLOCK_BYTES} to "
                    f"{begin + block * BLOCK_BYTES + part.size} is not what was written; the file "
                    "is damaged"
                )
            self._good.add((path, begin + block * BLOCK_BYTES))
