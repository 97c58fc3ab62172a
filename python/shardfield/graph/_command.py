"""`shardfield partition`: a mesh file in, pieces with ghosts out, progress and a quality table."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from shardfield.graph._files import read_mesh, write_mesh
from shardfield.graph._partition import Partition, partition
from shardfield.graph._picture import draw


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `shardfield partition`."""
    parser.add_argument("mesh", type=Path, help="mesh file: VTU, VTK, Gmsh, STL, PLY, OBJ, ...")
    parser.add_argument("-n", "--parts", type=int, required=True, help="number of pieces")
    parser.add_argument("-o", "--output", type=Path, help="file to write: pieces as .pvtu")
    parser.add_argument("--ghost-layers", type=int, default=0, help="layers of ghost cells")
    parser.add_argument("--method", default="auto", help="auto, hilbert, morton, rcb, metis, ...")
    parser.add_argument("--weights", help="cell field that says what each cell costs")
    parser.add_argument("--contact", default="point", help="neighbours: point, facet or radius")
    parser.add_argument("--radius", type=float, default=0.0, help="for --contact radius")
    parser.add_argument("--tolerance", type=float, default=0.0, help="allowed excess over the mean")
    parser.add_argument("--threads", type=int, default=0, help="0: one per core")
    parser.add_argument("--picture", type=Path, help="also draw the pieces into this PNG")


def run(arguments: argparse.Namespace) -> int:
    """Reads, partitions, writes and reports."""
    try:
        from rich.console import Console
    except ImportError as error:
        raise ImportError("the command needs rich; pip install shardfield[mesh]") from error
    console = Console()
    with console.status(f"reading {arguments.mesh}") as status:
        start = time.perf_counter()
        mesh = read_mesh(arguments.mesh)
        console.print(f"{arguments.mesh}: {mesh} in {time.perf_counter() - start:.2f} s")
        start = time.perf_counter()
        result = partition(
            mesh,
            arguments.parts,
            arguments.method,
            arguments.weights,
            arguments.ghost_layers,
            contact=arguments.contact,
            radius=arguments.radius,
            tolerance=arguments.tolerance,
            num_threads=arguments.threads,
            progress=lambda what: status.update(f"partitioning: {what}"),
        )
        seconds = time.perf_counter() - start
        written = []
        if arguments.output is not None:
            status.update(f"writing {arguments.output}")
            written += write_mesh(arguments.output, result)
        if arguments.picture is not None:
            status.update(f"drawing {arguments.picture}")
            written.append(draw(arguments.picture, result))
    print_table(console, result, seconds)
    for path in written[:1] + written[-1:] if len(written) > 2 else written:
        console.print(f"wrote {path}", highlight=False)
    return 0


def print_table(console: object, result: Partition, seconds: float) -> None:
    """What was tried, and how good the result is."""
    from rich.table import Table

    trials = Table(title="tried" if result.trials else None)
    for column in ("method", "largest halo", "total halo", "imbalance", "time"):
        trials.add_column(column, justify="left" if column == "method" else "right")
    for t in result.trials:
        style = "bold" if t.method == result.method else None
        row = (t.method, f"{t.largest_halo:,}", f"{t.total_halo:,}", f"{t.imbalance:.4f}")
        trials.add_row(*row, f"{t.seconds:.2f} s", style=style)
    quality = result.quality
    table = Table(title=f"{len(result)} pieces by {result.method}")
    table.add_column("")
    table.add_column("", justify="right")
    cells = quality.cells
    for name, value in (
        ("cells per piece", f"{cells.min():,} to {cells.max():,}"),
        ("imbalance", f"{quality.imbalance:.4f}"),
        ("cut (facets between pieces)", f"{quality.cut:,}"),
        ("largest halo (cells)", f"{quality.largest_halo:,}"),
        ("all halos (cells)", f"{int(quality.halos.sum()):,}"),
        ("largest halo / own cells", f"{quality.largest_halo / max(1, cells.max()):.1%}"),
        ("connected fragments", f"{int(quality.fragments.sum()):,}"),
        ("time", f"{seconds:.2f} s"),
    ):
        table.add_row(name, value)
    for part in (trials, table) if result.trials else (table,):
        console.print(part)  # type: ignore[attr-defined]
