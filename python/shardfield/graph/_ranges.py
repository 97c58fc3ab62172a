"""Labels of a mesh that no rank holds whole."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.distributed.device_mesh import DeviceMesh

from shardfield._core import core
from shardfield._mesh import core_mesh
from shardfield.graph._mesh import as_mesh


def whole_number(name: str, value: Any) -> int:
    """A count as Python's int. Raises TypeError for anything that is no whole number."""
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"partition: expected a whole number for {name}, got {value!r}") from None


def label_range(
    mesh: Any, num_parts: int, method: str, over: DeviceMesh, num_threads: int
) -> NDArray[np.int32]:
    """Labels of this rank's range of cells. Collective over `over`; see partition_labels."""
    ranks = core_mesh(over)
    device = "cpu" if over.device_type == "cpu" else str(torch.get_default_device())
    centers, own_error = np.zeros((0, 3)), None
    parts = 0
    try:
        parts = whole_number("num_parts", num_parts)
        if parts < 1 or parts >= 2**31:
            raise ValueError(f"partition_labels: expected at least 1 part, got {num_parts}")
        if mesh is not None:
            centers = as_mesh(mesh).centroids()
    except (TypeError, ValueError) as error:
        own_error = error
    # All ranks learn of a fault before the first of them waits for data.
    state = [0 if own_error is None else 1, len(centers), parts, method == "morton"]
    table = core.all_gather_ints([int(n) for n in state], ranks, torch.device(device))
    if own_error is not None:
        raise own_error
    faulty = [rank for rank, row in enumerate(table) if row[0]]
    if faulty:
        raise ValueError(
            f"partition_labels: ranks {faulty} cannot use the cells they were given; their own "
            "errors say why"
        )
    if any(row[2:] != table[0][2:] for row in table):
        wanted = [(row[2], "morton" if row[3] else "hilbert") for row in table]
        raise ValueError(
            f"partition_labels: ranks ask for different parts and methods, by rank {wanted}; "
            "expected the same everywhere"
        )
    if not any(row[1] for row in table):
        raise ValueError("partition_labels: no rank has any cells; expected at least one")
    return core.graph_label_range(centers, method, parts, ranks, device, num_threads)
