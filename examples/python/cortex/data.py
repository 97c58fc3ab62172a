"""The fsaverage5 cortical surface as shipped inside nilearn's wheel, as a graph with features."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
import torch
from brain.data import nilearn_folder, wheel_note
from numpy.typing import NDArray
from torch import Tensor

SURFACE, INFLATED = "white_{}.gii.gz", "infl_{}.gii.gz"
TARGETS = {"curvature": "curv_{}.gii.gz", "sulcus": "sulc_{}.gii.gz"}


@dataclass
class Surface:
    """One hemisphere as a graph: vertices are nodes, both directions of every side are edges.

    Attributes:
      points: ``(n, 3)``, millimetres, float64.
      inflated: the same vertices with the folds smoothed out, for pictures, ``(n, 3)``.
      triangles: ``(m, 3)``.
      nodes: unit normal of each vertex and mean length of its sides, ``(n, 4)``.
      edge_index: ``(2, e)``, sources and targets.
      edges: height of the source over the target's tangent plane and the reverse, cosine between
        both normals, length, ``(e, 4)``: the same however the head is turned.
      target: what is to be predicted, ``(n, 1)``, zero mean and unit deviation.
    """

    points: NDArray[np.float64]
    inflated: NDArray[np.float64]
    triangles: NDArray[np.int64]
    nodes: Tensor
    edge_index: Tensor
    edges: Tensor
    target: Tensor


def load(hemisphere: str, target: str, dtype: torch.dtype, coarser: int = 0) -> Surface:
    """Read a hemisphere's white surface and what FreeSurfer measured on it.

    Args:
      hemisphere: "left" or "right"; the right one is mirrored, so that both look alike.
      target: "curvature" or "sulcus" (sulcal depth).
      dtype: floating type of features and target.
      coarser: how often the icosahedral mesh is coarsened: 10242, 2562, 642, ... vertices.

    Raises:
      FileNotFoundError: nilearn is not installed, or has no such file.
    """
    points, triangles = (array.data for array in _read(SURFACE.format(hemisphere)).darrays)
    points, triangles = points.astype(np.float64), triangles.astype(np.int64)
    for _ in range(coarser):
        triangles = _coarser(triangles)
    mirror = [-1.0 if hemisphere == "right" else 1.0, 1.0, 1.0]
    if hemisphere == "right":
        triangles = triangles[:, ::-1].copy()
    points = points[: triangles.max() + 1] * mirror
    inflated = _read(INFLATED.format(hemisphere)).darrays[0].data[: len(points)] * mirror
    sides = np.concatenate([triangles[:, [0, 1]], triangles[:, [1, 2]], triangles[:, [2, 0]]])
    codes = np.unique(np.concatenate([sides, sides[:, ::-1]]) @ [len(points), 1])
    sources, targets = np.divmod(codes, len(points))
    arrows = points[sources] - points[targets]
    lengths = np.linalg.norm(arrows, axis=1, keepdims=True)
    degree = np.bincount(targets, minlength=len(points))
    mean_side = np.bincount(targets, lengths[:, 0], len(points)) / degree
    unit = lengths.mean()
    normals = _normals(points, triangles)
    nodes = np.column_stack([normals, mean_side / unit])
    over = (arrows * normals[targets]).sum(1), -(arrows * normals[sources]).sum(1)
    cosine = (normals[sources] * normals[targets]).sum(1)
    edges = np.column_stack([over[0] / unit, over[1] / unit, cosine, lengths / unit])
    values = _read(TARGETS[target].format(hemisphere)).darrays[0].data.astype(np.float64)
    values = values[: len(points)]
    values = (values - values.mean()) / values.std()
    return Surface(
        points,
        inflated,
        triangles,
        torch.from_numpy(nodes).to(dtype),
        torch.from_numpy(np.stack([sources, targets])),
        torch.from_numpy(edges).to(dtype),
        torch.from_numpy(values[:, None]).to(dtype),
    )


def licence_note() -> str:
    """Quote what the wheel says of the data's origin and licence, to be kept beside results."""
    files = [
        f.format(side) for f in (SURFACE, INFLATED, *TARGETS.values()) for side in ("left", "right")
    ]
    return wheel_note("Cortical surface: fsaverage5 of FreeSurfer", files, "fsaverage5.rst")


def _read(name: str) -> nibabel.GiftiImage:
    path: Path = nilearn_folder() / "datasets" / "data" / "fsaverage5" / name
    if not path.exists():
        raise FileNotFoundError(f"the installed nilearn has no {name}; install nilearn 0.14.1")
    return nibabel.load(path)


def _coarser(triangles: NDArray[np.int64]) -> NDArray[np.int64]:
    """The mesh before its last subdivision: every triangle there became four, the inner one made of
    the midpoints of its sides, which are numbered behind the old vertices.
    """
    old = (triangles.max() + 7) // 4
    corner = triangles < old
    inner, outer = triangles[~corner.any(1)], triangles[corner.any(1)]
    ends: dict[int, set[int]] = {}
    for triangle in outer.tolist():
        (vertex,) = (v for v in triangle if v < old)
        for middle in triangle:
            if middle >= old:
                ends.setdefault(middle, set()).add(vertex)
    pairs = (
        (ends[a] & ends[c], ends[a] & ends[b], ends[b] & ends[c]) for a, b, c in inner.tolist()
    )
    return np.array([[*p, *q, *r] for p, q, r in pairs])


def _normals(points: NDArray[np.float64], triangles: NDArray[np.int64]) -> NDArray[np.float64]:
    """Unit normals of the vertices: those of the triangles around, weighted by area."""
    a, b, c = points[triangles.T]
    areas = np.cross(b - a, c - a)
    normals = np.zeros_like(points)
    for corner in triangles.T:
        normals += np.column_stack([np.bincount(corner, n, len(points)) for n in areas.T])
    return normals / np.linalg.norm(normals, axis=1, keepdims=True)
