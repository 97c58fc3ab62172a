"""Safetensors files, written in one pass with hashes; checkpoint/reader.h reads them.

A file is 8 bytes of little-endian header length, a JSON header {name: {dtype, shape,
data_offsets}}, and the tensors' bytes one after the other.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

BLOCK_BYTES = 4 << 20

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
