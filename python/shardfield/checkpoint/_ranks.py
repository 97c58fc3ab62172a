"""Small JSON messages between the ranks that save or load together."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from shardfield._core import core
from shardfield.checkpoint._format import CheckpointError
from shardfield.distributed._groups import Group, default_device, group_mesh, process_group

T = TypeVar("T")


class Ranks:
    """The ranks of a group, or this process alone when there is no group."""

    def __init__(self, group: Group = None) -> None:
        self.group = process_group(group, "checkpoint") if dist.is_initialized() else None
        self.rank = self.group.rank() if self.group is not None else 0
        self.size = self.group.size() if self.group is not None else 1

    def all_gather_json(self, value: Any) -> list[Any]:
        """Every rank's value, by rank. Collective over the ranks."""
        if self.size == 1:
            return [json.loads(json.dumps(value))]
        device = default_device(self.group, "checkpoint")
        mesh = group_mesh(self.group, device, "checkpoint")
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8).to(device)
        sizes = [row[0] for row in core.all_gather_ints([data.numel()], mesh, device)]
        whole = core.all_gather_v(data, mesh, sizes, 0, True).cpu()
        return [json.loads(part.numpy().tobytes()) for part in whole.split(sizes)]

    def together(self, work: Callable[[], T], what: str) -> tuple[T, list[Any]]:
        """Runs local work on every rank; when it fails on one, all raise. What it returns must be
        JSON. Collective over the ranks.

        Returns:
            This rank's result, and every rank's.

        Raises:
            CheckpointError: with each failing rank's reason.
        """
        result: Any = None
        failure = ""
        try:
            result = work()
        except Exception as error:
            failure = str(error) or repr(error)
        answers = self.all_gather_json([failure, result if not failure else None])
        failed: dict[str, list[int]] = {}
        for rank, (text, _) in enumerate(answers):
            if text:
                failed.setdefault(text, []).append(rank)
        if failed:
            stories = [f"ranks {ranks}: {text}" for text, ranks in failed.items()]
            raise CheckpointError(f"{what}: " + "; ".join(stories))
        return result, [value for _, value in answers]
