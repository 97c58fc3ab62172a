"""Parts for the nodes of a graph."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from shardfield._core import core
from shardfield.graph._libraries import find_libraries


def partition_nodes(
    edge_index: Any,
    num_nodes: int,
    num_parts: int,
    method: str = "auto",
    *,
    coordinates: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    tolerance: float = 0.0,
    num_threads: int = 0,
    seed: int = 0,
) -> NDArray[np.int32]:
    """The part of every node of a graph, 0 .. num_parts - 1. Local and deterministic.

    The graph may be directed, with repeated edges, self-loops and isolated nodes: a simple
    symmetric copy is partitioned, the edges given stay as they are.

    Args:
        edge_index: (2, num_edges) sources and targets, array or tensor.
        num_nodes: how many nodes; never guessed from the edges.
        num_parts: how many parts.
        method: "levels" (breadth-first halving), "metis", "kahip", "scotch" where found, with
            coordinates also "hilbert", "morton", "rcb"; "auto" takes the best of all, judged by
            the largest part's halo, and improves it by swaps.
        coordinates: (num_nodes, 1 to 3).
        weights: cost of each node, (num_nodes,).
        tolerance: as for `partition`.
        num_threads: 0 means one per core.
        seed: for KaHIP and Scotch.

    Returns:
        int32, (num_nodes,).

    Raises:
        ValueError: for edges out of range or arguments of the wrong shape.
        RuntimeError: for a method whose library is not there.

    Example:
        >>> partition_nodes([[0, 1, 0, 2], [1, 0, 1, 2]], num_nodes=3, num_parts=3, method="levels")
        array([0, 1, 2], dtype=int32)
    """
    find_libraries()
    edges = edge_array(edge_index, num_nodes, "partition_nodes")
    order = np.argsort(edges[0], kind="stable")
    offsets: NDArray[np.int64] = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(edges[0], minlength=num_nodes), out=offsets[1:])
    places = np.zeros((0, 3))
    if coordinates is not None:
        places = np.asarray(coordinates, np.float64)
        if places.ndim != 2 or places.shape[0] != num_nodes or not 1 <= places.shape[1] <= 3:
            raise ValueError(
                f"partition_nodes: expected coordinates ({num_nodes}, 1 to 3), got {places.shape}"
            )
        places = np.pad(places, ((0, 0), (0, 3 - places.shape[1])))
    loads = np.zeros(0) if weights is None else np.ascontiguousarray(weights, np.float64)
    labels, _, _ = core.graph_label_nodes(
        offsets,
        np.ascontiguousarray(edges[1][order]),
        np.ascontiguousarray(places),
        num_parts,
        method,
        loads,
        tolerance,
        num_threads,
        seed,
    )
    return labels


def edge_array(edge_index: Any, num_nodes: int, op: str) -> NDArray[np.int64]:
    """`edge_index` as int64 (2, num_edges), every end checked."""
    if isinstance(edge_index, torch.Tensor):
        edge_index = edge_index.detach().cpu().numpy()
    edges = np.asarray(edge_index)
    if edges.size == 0:
        edges = np.zeros((2, 0), np.int64)
    if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
        raise ValueError(
            f"{op}: expected edge_index (2, num_edges) of integers, got {edges.dtype} {edges.shape}"
        )
    bad = np.flatnonzero(((edges < 0) | (edges >= num_nodes)).any(0))
    if len(bad):
        raise ValueError(
            f"{op}: edge {bad[0]} joins nodes {edges[0, bad[0]]} and {edges[1, bad[0]]}; expected "
            f"0 to {num_nodes - 1}"
        )
    return np.ascontiguousarray(edges, np.int64)
