"""Searches of points: nearest ones, and all within a radius. Exact on any number of ranks."""

from __future__ import annotations

import torch

from shardfield._core import core

__all__ = ["knn", "radius_search"]


def knn(
    points: torch.Tensor, queries: torch.Tensor, k: int = 3
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k nearest points of each query, nearest first.

    Of equally near points the lower index comes first, so the result does not depend on the number
    of ranks. Each rank searches its own points in a k-d tree (Bentley, 1975; nanoflann), then those
    points of other ranks that can be nearer to one of its queries, which travel once: points in an
    order that keeps neighbours together send least (cut by
    `shardfield.graph.partition_nodes(..., "hilbert", coordinates=...)`, or sorted). The trees are on
    the CPU for tensors of any device. Collective over the mesh where an argument is sharded.

    Args:
        points: (n, dims), floating, finite; sharded along any dims, or plain.
        queries: (m, dims), the same dtype; sharded alike or otherwise, or plain.
        k: 1 to n.

    Returns:
        Indices, int64 (m, k), and distances, (m, k) in the dtype of the queries. Cut along the rows
        of the queries; plain where those are plain. Distances have gradients to points and queries,
        0 where a query is a point.

    Raises:
        RuntimeError: on every rank alike: other shapes or dtypes, k out of range, NaN or infinity,
            another k or size on some rank, two meshes.
    """
    return core.knn(points, queries, k)


def radius_search(
    points: torch.Tensor,
    queries: torch.Tensor,
    radius: float,
    max_points: int | None = None,
    return_dists: bool = False,
    return_points: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """All points within a radius of each query, the radius included; nearest first.

    Of equally near points the lower index comes first. Only points within the radius of another
    rank's queries travel there, once. Collective over the mesh where an argument is sharded.

    Args:
        points: (n, dims), floating, finite; sharded along any dims, or plain.
        queries: (m, dims), the same dtype; sharded alike or otherwise, or plain.
        radius: in the unit of the coordinates, 0 or more.
        max_points: keep only so many of each query, the nearest; None keeps all.
        return_dists: whether to return distances too.
        return_points: whether to return the neighbours' coordinates too.

    Returns:
        The indices; with `return_points` or `return_dists` a tuple of indices, points, distances,
        as asked for. Without `max_points` the indices are int64 (2, pairs), query above point, in
        order of the queries and cut along the pairs; points (pairs, dims); distances (pairs). With
        `max_points` they are (m, max_points), points (m, max_points, dims), distances (m,
        max_points), unused places 0. Points and distances have gradients to points and queries.

    Raises:
        RuntimeError: on every rank alike: as `knn`, or a radius that is negative or not finite.
    """
    indices, found, distances = core.radius_search(
        points, queries, radius, max_points, return_points, return_dists
    )
    results = [t for t in (indices, found, distances) if t is not None]
    return tuple(results) if len(results) > 1 else indices
