"""The picture: three planes of scan, truth and predictions with the borders of the pieces."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.patches import Patch

from .compare import RunResult, Runs
from .data import CLASSES, Brain

_COLOURS = ("#101418", "#c8553d", "#f2e9d8")
_BORDER = "#38d9f5"
_PLANES = (("axial", 2), ("coronal", 1), ("sagittal", 0))


def _slice(volume: np.ndarray, axis: int, at: int) -> np.ndarray:
    """One plane, first axis across and second up."""
    return np.take(volume, at, axis=axis).T


def _borders(ax: Axes, cuts: Sequence[Sequence[int]], axis: int) -> None:
    across, up = (a for a in range(3) if a != axis)
    for border in cuts[across][1:-1]:
        ax.axvline(border - 0.5, color=_BORDER, linewidth=1.1, linestyle=(0, (4, 2)))
    for border in cuts[up][1:-1]:
        ax.axhline(border - 0.5, color=_BORDER, linewidth=1.1, linestyle=(0, (4, 2)))


def _rank_names(ax: Axes, cuts: Sequence[Sequence[int]], axis: int, at: int) -> None:
    """Write each piece's rank into its corner; ranks run row-major over the cut axes."""
    across, up = (a for a in range(3) if a != axis)
    pieces = [len(cut) - 1 for cut in cuts]
    fixed = int(np.searchsorted(cuts[axis], at, side="right")) - 1
    style = {"color": _BORDER, "fontsize": 7, "va": "bottom"}
    style["bbox"] = {"facecolor": _COLOURS[0], "edgecolor": "none", "alpha": 0.6, "pad": 1}
    for i in range(pieces[across]):
        for j in range(pieces[up]):
            coordinate = [0, 0, 0]
            coordinate[axis], coordinate[across], coordinate[up] = fixed, i, j
            rank = int(np.ravel_multi_index(coordinate, pieces))
            x, y = cuts[across][i], cuts[up][j]
            ax.text(x + 0.6, y + 0.6, f"rank {rank}", **style)


def _losses(ax: Axes, runs: Runs) -> None:
    ax.plot(runs.serial.losses, color="#d0d4d9", linewidth=5, alpha=0.45, label="serial")
    for run, style in zip([*runs.sharded, *runs.cpp], cycle(("-", "--", ":", "-.")), strict=False):
        ax.plot(run.losses, style, linewidth=1.4, label=f"{run.title} (worst {run.worst:.0e})")
    ax.set_xlabel("step")
    ax.set_ylabel("loss")
    ax.legend(frameon=False, fontsize=8)
    ax.spines[["top", "right"]].set_visible(False)


def _memory(ax: Axes, runs: Runs) -> None:
    """Peak activation memory per rank as bars beside serial/N + halo."""
    named = [("serial", runs.serial)] + [(run.title, run) for run in runs.sharded]
    for row, (_, run) in enumerate(named):
        peaks = [peak / 2**20 for peak in run.activation_bytes]
        height = 0.8 / len(peaks)
        for index, peak in enumerate(peaks):
            ax.barh(row - 0.4 + height * (index + 0.5), peak, height * 0.85, color="#5b8db8")
        if run.limit_bytes:
            limit = run.limit_bytes / 2**20
            ax.plot([limit, limit], [row - 0.42, row + 0.42], color="#f0a202", linewidth=2)
    ax.plot([], [], color="#f0a202", linewidth=2, label="serial/N + halo")
    ax.set_yticks(range(len(named)), [name for name, _ in named])
    ax.invert_yaxis()
    ax.set_xlabel("peak activation memory of each rank, MiB")
    ax.legend(frameon=False, fontsize=8, loc="lower right")
    ax.spines[["top", "right"]].set_visible(False)


def draw(
    path: Path,
    brain: Brain,
    runs: Runs,
    predictions: Sequence[tuple[RunResult, Sequence[Sequence[int]], np.ndarray]],
) -> None:
    """Draw the picture.

    Args:
      path: PNG to write.
      brain: the volume.
      runs: figures for the loss and memory panels.
      predictions: per sharded run, borders along the three axes and predicted classes.
    """
    scan, labels = brain.scan[0, 0].double().numpy(), brain.labels[0].numpy()
    whole = [[0, size] for size in labels.shape]
    columns: list = [("T1 scan", whole, scan, "gray"), ("truth", whole, labels, None)]
    columns += [(run.title, cuts, volume, None) for run, cuts, volume in predictions]
    with plt.style.context("dark_background"):
        figure = plt.figure(figsize=(3.1 * len(columns), 11.6), layout="constrained")
        top, bottom = figure.subfigures(2, 1, height_ratios=(3.4, 1))
        grid = top.subplots(3, len(columns), squeeze=False)
        for row, (plane, axis) in enumerate(_PLANES):
            at = int(labels.shape[axis] * (0.47 if axis else 0.42))
            for ax, (title, cuts, volume, gray) in zip(grid[row], columns, strict=True):
                colours = gray or ListedColormap(_COLOURS)
                limits = (None, None) if gray else (0, len(CLASSES) - 1)
                image = _slice(volume, axis, at)
                ax.imshow(image, cmap=colours, vmin=limits[0], vmax=limits[1], origin="lower")
                _borders(ax, cuts, axis)
                if cuts is not whole:
                    _rank_names(ax, cuts, axis, at)
                ax.set_xticks([])
                ax.set_yticks([])
                if row == 0:
                    ax.set_title(title)
            grid[row][0].set_ylabel(plane)
        handles = [Patch(color=c, label=n) for c, n in zip(_COLOURS, CLASSES, strict=True)]
        handles[0].set_edgecolor("#606060")
        top.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
        left, right = bottom.subplots(1, 2)
        _losses(left, runs)
        _memory(right, runs)
        figure.savefig(path, dpi=110)
    plt.close(figure)
