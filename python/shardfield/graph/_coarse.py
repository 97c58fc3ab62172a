"""Coarser levels of a graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardfield._core import core
from shardfield.graph._nodes import edge_array


@dataclass(frozen=True)
class CoarseLevel:
    """A level of a hierarchy of graphs.

    Attributes:
        nodes: number of each of its nodes in the level above, ascending, int64 (num_nodes,).
        edge_index: edges between them in the level's own numbers, both directions, int64
            (2, num_edges).
    """

    nodes: NDArray[np.int64]
    edge_index: NDArray[np.int64]


def bistride_levels(edge_index: Any, num_nodes: int, num_levels: int) -> list[CoarseLevel]:
    """Coarser and coarser levels by bi-stride pooling (Cao et al., BSMS-GNN, 2023). Local and
    deterministic.

    A breadth-first search from the lowest number of each component puts its nodes into layers.
    Every other layer is kept, the even ones unless the odd ones are fewer; kept nodes at most two
    edges apart are joined. Each component stays in one piece and each node is kept or has a
    neighbour that is.

    Args:
        edge_index: (2, num_edges) sources and targets; directions, repeats and self-loops do not
            matter.
        num_nodes: how many nodes; never guessed from the edges.
        num_levels: how many coarser levels.

    Returns:
        One `CoarseLevel` per level, about half the size of the one before.

    Raises:
        ValueError: for edges out of range or fewer than 0 levels.

    Example:
        >>> level = bistride_levels([[0, 1, 2, 3], [1, 2, 3, 4]], num_nodes=5, num_levels=1)[0]
        >>> level.nodes, level.edge_index
        (array([1, 3]), array([[0, 1], [1, 0]]))
    """
    edges = edge_array(edge_index, num_nodes, "bistride_levels")
    order = np.argsort(edges[0], kind="stable")
    offsets: NDArray[np.int64] = np.zeros(num_nodes + 1, np.int64)
    np.cumsum(np.bincount(edges[0], minlength=num_nodes), out=offsets[1:])
    found = core.graph_bistride_levels(offsets, np.ascontiguousarray(edges[1][order]), num_levels)
    return [
        CoarseLevel(nodes, np.stack([np.repeat(np.arange(len(nodes)), np.diff(starts)), targets]))
        for nodes, starts, targets in found
    ]
