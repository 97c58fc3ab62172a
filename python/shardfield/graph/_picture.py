"""Pictures of partitions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shardfield.graph._partition import Partition, Piece

LIGHT = np.array([0.4, -0.6, 0.7]) / np.linalg.norm([0.4, -0.6, 0.7])


def draw(path: str | Path, partition: Partition, gap: float = 0.15) -> Path:
    """Draws the pieces of a partition, each in a colour of its own and moved apart, into a PNG.
    Local; needs no display.

    Args:
        path: the PNG file (or what else matplotlib writes).
        partition: what to draw.
        gap: how far pieces are moved away from the middle, as a share of their distance to it.

    Returns:
        The path.

    Raises:
        ImportError: where pyvista or matplotlib is not installed.
    """
    try:
        from matplotlib import colormaps
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from mpl_toolkits.mplot3d.art3d import Line3DCollection, Poly3DCollection
    except ImportError as error:
        raise ImportError("draw: pictures need matplotlib; pip install shardfield[mesh]") from error
    figure = Figure(figsize=(10, 8), dpi=100)
    canvas = FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot(projection="3d", proj_type="ortho")
    low, high = _box(partition)
    middle = (low + high) / 2
    shapes: dict[int, list[NDArray[np.float64]]] = {1: [], 2: [], 3: []}  # by number of corners
    colors: dict[int, list[NDArray[np.float64]]] = {1: [], 2: [], 3: []}
    for piece in partition:
        if piece.num_owned_cells == 0:
            continue
        color = np.array(colormaps["tab20"](piece.part % 20)[:3])
        found = _shapes(piece)
        places = np.concatenate([shape.reshape(-1, 3) for shape in found])
        away = (places.mean(0) - middle) * gap
        for shape in found:
            bright = _brightness(shape) if shape.shape[1] == 3 else np.ones(len(shape))
            shapes[shape.shape[1]].append(shape + away)
            colors[shape.shape[1]].append(bright[:, None] * color)
    dots, lines, triangles = (np.concatenate(shapes[n]) for n in (1, 2, 3))
    of_dots, of_lines, faces = (np.concatenate(colors[n]) for n in (1, 2, 3))
    axes.add_collection3d(  # one collection: matplotlib sorts by depth inside of one only
        Poly3DCollection(triangles, facecolors=faces, edgecolors=faces, linewidths=0.2)
    )
    if len(lines):
        axes.add_collection3d(Line3DCollection(lines, colors=of_lines, linewidths=3))
    if len(dots):
        axes.scatter(*dots[:, 0].T, c=of_dots, s=30, depthshade=False)
    half = max((high - low).max() * (0.5 + gap), 1e-12)
    axes.set(
        xlim=(middle[0] - half, middle[0] + half),
        ylim=(middle[1] - half, middle[1] + half),
        zlim=(middle[2] - half, middle[2] + half),
    )
    axes.set_box_aspect((1, 1, 1), zoom=1.2)
    axes.set_axis_off()
    if high[2] == low[2]:
        axes.view_init(90, -90)
    axes.set_title(
        f"{len(partition)} pieces by {partition.method}, largest halo "
        f"{partition.quality.largest_halo:,} cells"
    )
    canvas.print_figure(str(path))
    return Path(path)


def _box(partition: Partition) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Corners of the mesh's box, with three coordinates."""
    points = partition.mesh.points
    pad = (0, 3 - points.shape[1])
    return np.pad(points.min(0), pad), np.pad(points.max(0), pad)


def _shapes(piece: Piece) -> list[NDArray[np.float64]]:
    """Points (n, 1, 3), line segments (n, 2, 3) and outer triangles (n, 3, 3) of a piece's own
    cells.
    """
    own = piece.to_pyvista().extract_cells(np.arange(piece.num_owned_cells))
    for fields in (own.cell_data, own.point_data):
        fields.pop("vtkGhostType", None)  # a border point may be another part's
    surface = own.extract_surface(algorithm=None)
    ends = [_lists(surface.GetLines()), _lists(surface.GetVerts())]
    points = np.asarray(surface.points, np.float64)
    dots = [line.reshape(-1, 1) for line in ends[1]]
    pairs = [np.stack([line[:-1], line[1:]], 1) for line in ends[0]]
    filled = surface.triangulate()
    return [
        points[np.concatenate([np.zeros((0, 1), int), *dots])],
        points[np.concatenate([np.zeros((0, 2), int), *pairs])],
        np.asarray(filled.points, np.float64)[filled.faces.reshape(-1, 4)[:, 1:]],
    ]


def _lists(cells: Any) -> list[NDArray[np.int64]]:
    """Point numbers of each cell of a VTK cell array."""
    from vtkmodules.util.numpy_support import vtk_to_numpy

    offsets = vtk_to_numpy(cells.GetOffsetsArray())
    return np.split(vtk_to_numpy(cells.GetConnectivityArray()), offsets[1:-1])


def _brightness(triangles: NDArray[np.float64]) -> NDArray[np.float64]:
    """How bright each triangle is, 0 to 1."""
    edges = triangles[:, 1:] - triangles[:, :1]
    normals = np.cross(edges[:, 0], edges[:, 1])
    lengths = np.linalg.norm(normals, axis=1, keepdims=True)
    lit = np.abs((normals / np.maximum(lengths, 1e-300)) @ LIGHT)
    return 0.55 + 0.45 * lit
