"""The picture: what was measured, what the network says, and which rank held what."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from .data import Surface
from .train import Result

RANGE = 2.5


def draw(
    path: Path, left: Surface, right: Surface, name: str, serial: Result, ranks: Result
) -> None:
    """Write the PNG; needs no display."""
    figure = Figure(figsize=(13, 8), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes: NDArray = figure.subplots(2, 3)
    truth, held_out = left.target[:, 0].numpy(), right.target[:, 0].numpy()
    count = int(ranks.labels.max()) + 1
    _show(axes[0, 0], left, _shades(truth), f"{name}, as measured")
    score = correlation(ranks.prediction, truth)
    title = f"predicted on {count} ranks (correlation {score:.2f})"
    _show(axes[0, 1], left, _shades(ranks.prediction), title)
    palette = np.array([colormaps["tab20"](label % 20)[:3] for label in range(count)])
    title = f"{count} pieces; a rank borrows up to {max(ranks.halos)} vertices"
    _show(axes[0, 2], left, palette[ranks.labels], title)
    _show(axes[1, 0], right, _shades(held_out), "right hemisphere, mirrored, never seen")
    score = correlation(ranks.held_out, held_out)
    _show(axes[1, 1], right, _shades(ranks.held_out), f"predicted (correlation {score:.2f})")
    _losses(axes[1, 2], serial.losses, ranks.losses, count)
    canvas.print_figure(str(path))


def correlation(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    """Pearson's, of two fields over the vertices."""
    return float(np.corrcoef(a, b)[0, 1])


def _shades(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return colormaps["coolwarm"](np.clip(values / RANGE, -1, 1) / 2 + 0.5)[:, :3]


def _show(ax: Axes, surface: Surface, colours: NDArray[np.float64], title: str) -> None:
    """The inflated surface from its outer side; nearer triangles are drawn over farther ones."""
    corners = surface.inflated[surface.triangles]
    normals = np.cross(corners[:, 1] - corners[:, 0], corners[:, 2] - corners[:, 0])
    facing = -normals[:, 0] / np.maximum(np.linalg.norm(normals, axis=1), 1e-300)
    seen = np.flatnonzero(facing > 0)
    seen = seen[np.argsort(-corners[seen, :, 0].mean(1))]
    shade = colours[surface.triangles[seen]].mean(1) * (0.5 + 0.5 * facing[seen, None])
    flat = corners[seen][:, :, 1:] * [-1.0, 1.0]
    ax.add_collection(PolyCollection(flat, facecolors=shade, edgecolors=shade, linewidths=0.3))
    ax.autoscale_view()
    ax.set_aspect("equal")
    ax.set_axis_off()
    ax.set_title(title, fontsize=10)


def _losses(ax: Axes, serial: Sequence[float], ranks: Sequence[float], count: int) -> None:
    ax.plot(serial, color="#c8ccd0", linewidth=6, label="serial")
    ax.plot(ranks, color="#b03a2e", linewidth=1.5, label=f"{count} ranks")
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.legend(frameon=False)
    ax.spines[["top", "right"]].set_visible(False)
