"""Every partitioner on the same meshes in one run: time, cut, halos.

    python benchmarks/partition/partition_bench.py [--large] [--json FILE]

Halos are what a model holds: cells of other parts that share a point with a part's own cells. The
largest part sets the time of a step. --large also times ten million hexahedra.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import shardfield.graph as graph

CUBE = [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0), (0, 0, 1), (1, 0, 1), (1, 1, 1), (0, 1, 1)]
SIXTHS = [(0, 1, 2, 6), (0, 2, 3, 6), (0, 3, 7, 6), (0, 7, 4, 6), (0, 4, 5, 6), (0, 5, 1, 6)]


def box(nx: int, ny: int, nz: int) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Points and hexahedra of a box of unit cubes."""
    axes = [np.arange(n + 1.0) for n in (nx, ny, nz)]
    points = np.stack(np.meshgrid(*axes, indexing="ij"), -1).reshape(-1, 3)
    number = np.arange(len(points)).reshape(nx + 1, ny + 1, nz + 1)
    cells = [number[x : x + nx, y : y + ny, z : z + nz].ravel() for x, y, z in CUBE]
    return points, np.stack(cells, 1)


def hex_box(n: int) -> graph.Mesh:
    points, cells = box(n, n, n)
    return graph.Mesh(points, [("hexahedron", cells)])


def tet_bar(nx: int, ny: int, nz: int) -> graph.Mesh:
    points, cells = box(nx, ny, nz)
    return graph.Mesh(points, [("tetra", cells[:, SIXTHS].reshape(-1, 4))])


def shell(n: int, thickness: int) -> graph.Mesh:
    """The outer layers of a box, blown up to a sphere."""
    points, cells = box(n, n, n)
    x = np.stack(np.meshgrid(*[np.arange(n)] * 3, indexing="ij"), -1).reshape(-1, 3)
    cells = cells[((x < thickness) | (x >= n - thickness)).any(1)]
    used, nodes = np.unique(cells, return_inverse=True)
    centered = points[used] * 2 / n - 1
    radius = np.linalg.norm(centered, axis=1, keepdims=True)
    ball = centered / radius * np.abs(centered).max(1, keepdims=True)
    return graph.Mesh(ball, [("hexahedron", nodes.reshape(-1, 8))])


CASES: dict[str, tuple[Callable[[], graph.Mesh], int]] = {
    "hex box 60^3": (lambda: hex_box(60), 16),
    "hex box 60^3, more parts": (lambda: hex_box(60), 64),
    "spherical shell": (lambda: shell(48, 4), 16),
    "tet bar 80 x 24 x 16": (lambda: tet_bar(80, 24, 16), 16),
    "tet bar 80 x 24 x 16, more parts": (lambda: tet_bar(80, 24, 16), 64),
}


def others() -> dict[str, Callable[[graph.Mesh, int], NDArray[Any]]]:
    """Labels by other libraries, where they are installed."""
    found: dict[str, Callable[[graph.Mesh, int], NDArray[Any]]] = {}
    try:
        import meshioplusplus as other
    except ImportError:
        return found

    def by_curve(mesh: graph.Mesh, parts: int) -> NDArray[Any]:
        cells = [(block.kind, block.nodes) for block in mesh.blocks]
        labels = other.partition_labels(other.Mesh(mesh.points, cells), parts, method="sfc")
        return np.concatenate(labels)

    found["meshio++ sfc"] = by_curve
    return found


def rows_of(name: str, mesh: graph.Mesh, parts: int) -> list[dict[str, Any]]:
    """One row per method."""
    rows = []

    def add(method: str, labels: NDArray[Any], seconds: float) -> None:
        q = graph.cut_by_labels(mesh, labels, parts, ghost_layers=1).quality
        rows.append(
            {
                "mesh": name,
                "cells": mesh.num_cells,
                "parts": parts,
                "method": method,
                "seconds": round(seconds, 3),
                "cut": q.cut,
                "face halo": int(q.facet_halos.sum()),
                "node ghosts": int(q.halos.sum()),
                "max per part": q.largest_halo,
                "sizes": f"{q.cells.min()}-{q.cells.max()}",
            }
        )

    for method in [*graph.methods(), "auto"]:
        start = time.perf_counter()
        labels = graph.partition_labels(mesh, parts, method)
        add(method, labels, time.perf_counter() - start)
    for method, call in others().items():
        start = time.perf_counter()
        labels = call(mesh, parts)
        add(method, labels, time.perf_counter() - start)
    return rows


def large() -> None:
    """Ten million hexahedra: the methods that need no graph."""
    mesh = hex_box(215)
    for method in ("hilbert", "morton", "rcb"):
        start = time.perf_counter()
        labels = graph.partition_labels(mesh, 16, method)
        seconds = time.perf_counter() - start
        sizes = np.bincount(labels)
        print(
            f"{mesh.num_cells:,} cells, 16 parts, {method}: {seconds:.2f} s "
            f"({mesh.num_cells / seconds / 1e6:.1f} M cells/s), sizes {sizes.min()}-{sizes.max()}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name, (make, parts) in CASES.items():
        mesh = make()
        print(f"\n{name}: {mesh.num_cells:,} cells, {parts} parts")
        print(
            f"{'method':14}{'s':>8}{'cut':>9}{'face halo':>11}{'ghosts':>9}{'max/part':>10}  sizes"
        )
        new = rows_of(name, mesh, parts)
        for r in new:
            print(
                f"{r['method']:14}{r['seconds']:8.2f}{r['cut']:9,}{r['face halo']:11,}"
                f"{r['node ghosts']:9,}{r['max per part']:10,}  {r['sizes']}"
            )
        single = min(r["max per part"] for r in new if r["method"] != "auto")
        best = next(r["max per part"] for r in new if r["method"] == "auto")
        print(f"auto {best:,}, best single method {single:,}")
        rows += new
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    if arguments.large:
        large()


if __name__ == "__main__":
    main()
