"""Checkpoints of torch.distributed.checkpoint, read into plain, sharded and DTensor states."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

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
        state: nested mappings of tensors (plain, sharded, DTensor) and modules, with the names that
            were saved. Filled in place.
        allow_pickle: torch keeps these checkpoints' metadata as a pickle, which may run any code
            while it is read. Say True only for files you trust.
        group: the ranks that load together; None for all.

    Returns:
        The state.

    Raises:
        CheckpointError: on all ranks: without allow_pickle, no checkpoint, names or shapes that do
            not fit.

    Example:
        >>> load_dcp("old_run/step_100", {"model": net}, allow_pickle=True)
    """
    if not allow_pickle:
        raise CheckpointError(
            "load_dcp: the metadata of torch.distributed.checkpoint is a pickle, which may run any "
            "code; pass allow_pickle=True for files you trust"
        )
    ranks = Ranks(group)

    def work() -> None:
        if not (Path(path) / ".metadata").is_file():
            raise CheckpointError(f"{path} holds no checkpoint of torch (.metadata is missing)")
        found: dict[str, torch.Tensor] = {}
        _state.templates(state, "", found)
        boxes = {}
        for name, target in found.items():
            piece = _state.piece_of(name, target)
            if prod(piece.local.shape):
                boxes[name.replace("/", ".").replace("~1", "/").replace("~0", "~")] = _Box.of(piece)
        try:
            with torch.no_grad():
                dcp.load(boxes, checkpoint_id=str(path), no_dist=True)
        except CheckpointException as error:  # no Exception: it would pass by the other ranks
            reasons = [str(reason) for reason, _ in error.failures.values()]
            raise CheckpointError("; ".join(reasons)) from None

    ranks.together(work, "load_dcp")
    return state
