"""Cutting a mesh into pieces with ghosts, owners, global numbers and exchange plans."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfield._core import core
from shardfield._mesh import core_mesh
from shardfield.graph._libraries import find_libraries
from shardfield.graph._mesh import CellBlock, Mesh, as_mesh, grid_of
from shardfield.graph._ranges import label_range, whole_number

Progress = Callable[[str], None]


class Trial(NamedTuple):
    """One method that "auto" tried."""

    method: str
    largest_halo: int
    total_halo: int
    imbalance: float
    seconds: float


@dataclass(frozen=True)
class Quality:
    """How good a partition is; the largest part sets the time of a step.

    Attributes:
        cut: facets between different parts.
        cells: own cells of each part.
        loads: weight of each part (the cells where unweighted).
        halos: ghost cells of each part under the rule asked for (one layer if none was).
        facet_halos: cells of other parts across a facet, per part.
        fragments: connected pieces of each part; 1 is best.
    """

    cut: int
    cells: NDArray[np.int64]
    loads: NDArray[np.float64]
    halos: NDArray[np.int64]
    facet_halos: NDArray[np.int64]
    fragments: NDArray[np.int64]

    @property
    def largest_halo(self) -> int:
        """Ghost cells of the part that has most."""
        return int(self.halos.max())

    @property
    def imbalance(self) -> float:
        """Largest load over the mean load; 1 is perfect."""
        return float(self.loads.max() * len(self.loads) / self.loads.sum())


class ExchangePlan:
    """How the ghost rows of one piece get their owners' values.

    Attributes:
        num_owned: rows 0 .. num_owned - 1 are the piece's own.
        num_rows: own rows and ghosts.
        sends: part -> local rows that go there, int64, ascending.
        receives: part -> slice of local rows that come from there, in the sender's order.
    """

    def __init__(self, plan: Any) -> None:
        self._core = plan
        self.num_owned: int = plan.num_owned
        self.num_rows: int = plan.num_rows
        self.sends: dict[int, NDArray[np.int64]] = dict(plan.sends)
        self.receives = {part: slice(begin, begin + n) for part, begin, n in plan.receives}

    def fetch(self, own: Tensor, mesh: DeviceMesh) -> Tensor:
        """Own rows and behind them the ghosts', from their owners. Collective over `mesh`, one
        message per pair of touching parts. Differentiable to any order: the backward adds each
        copy's gradient at its owner.

        Args:
            own: this rank's rows (num_owned, ...), plain or a sharded tensor's piece.
            mesh: one axis, the rank of each part at the part's number.

        Returns:
            Per-rank tensor, (num_rows, ...).
        """
        piece = own.to_local() if hasattr(own, "to_local") else own
        if piece.dim() == 0 or piece.size(0) != self.num_owned:
            raise ValueError(
                f"ExchangePlan.fetch: expected {self.num_owned} rows in front, got shape "
                f"{tuple(piece.shape)} on rank {mesh.get_rank()}"
            )
        return core.graph_listed_rows(core_mesh(mesh), 0, self._core, str(piece.device)).fetch(
            piece
        )

    def __reduce__(self) -> tuple[Any, ...]:
        receives = [
            (part, rows.start, rows.stop - rows.start) for part, rows in self.receives.items()
        ]
        return _plan_of, (self.num_owned, self.num_rows, list(self.sends.items()), receives)

    def __repr__(self) -> str:
        out = {part: len(rows) for part, rows in self.sends.items()}
        return f"ExchangePlan({self.num_owned} own of {self.num_rows} rows, sends {out})"


def _plan_of(*fields: Any) -> ExchangePlan:
    """A plan from its pickled form."""
    return ExchangePlan(core.ExchangePlan(*fields))


class Piece:
    """What one rank holds of a mesh: own cells first (ascending by global number), then ghosts by
    (owner, global number); points likewise. The owner of a point is the lowest part among its
    cells.

    Attributes:
        part: number of the piece.
        cells: global number of each local cell, int64.
        cell_owners: part that owns it, int32.
        cell_layers: 0 for own cells, else the ghost layer, int32.
        points: global number of each local point, int64.
        point_owners: part that owns it, int32.
        cell_exchange: plan for cell fields.
        point_exchange: plan for point fields.
    """

    def __init__(self, piece: Any, mesh: Mesh) -> None:
        self._cells = piece.kinds, piece.offsets, piece.nodes
        self._whole = mesh
        self.part: int = piece.part
        self.cells: NDArray[np.int64] = piece.cells
        self.cell_owners: NDArray[np.int32] = piece.cell_owners
        self.cell_layers: NDArray[np.int32] = piece.cell_layers
        self.points: NDArray[np.int64] = piece.points
        self.point_owners: NDArray[np.int32] = piece.point_owners
        self.cell_exchange = ExchangePlan(piece.cell_exchange)
        self.point_exchange = ExchangePlan(piece.point_exchange)

    @property
    def num_owned_cells(self) -> int:
        """Cells that this piece owns; they come first."""
        return self.cell_exchange.num_owned

    @functools.cached_property
    def coordinates(self) -> NDArray[np.float64]:
        """Points of the piece, (num_points, dim)."""
        return self._whole.points[self.points]

    def connectivity(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Kinds (VTK's numbers), offsets and local point numbers of the piece's cells."""
        return self._cells

    def point_data(self) -> dict[str, NDArray[Any]]:
        """The mesh's point fields on this piece, with "owner", "global_id" and "vtkGhostType"."""
        fields = {name: values[self.points] for name, values in self._whole.point_data.items()}
        ghost = (self.point_owners != self.part).astype(np.uint8)
        return {
            **fields,
            "owner": self.point_owners,
            "global_id": self.points,
            "vtkGhostType": ghost,
        }

    def cell_data(self) -> dict[str, NDArray[Any]]:
        """The mesh's cell fields on this piece, with "owner", "global_id", "ghost_layer" and
        "vtkGhostType" (1 for ghosts, as VTK and ParaView read it).
        """
        fields = {name: values[self.cells] for name, values in self._whole.cell_data.items()}
        return {
            **fields,
            "owner": self.cell_owners,
            "global_id": self.cells,
            "ghost_layer": self.cell_layers,
            "vtkGhostType": (self.cell_layers > 0).astype(np.uint8),
        }

    def cell_sets(self) -> dict[str, NDArray[np.int64]]:
        """Local rows of the piece's own cells in each of the mesh's sets. Every set is there on
        every piece, with no rows where the piece has none of its cells.
        """
        own = self.cells[: self.num_owned_cells]  # ascending
        rows = {}
        for name, cells in self._whole.cell_sets.items():
            place: NDArray[np.int64] = np.searchsorted(own, cells)
            place = place[(place < len(own)) & np.isin(cells, own)]
            rows[name] = np.sort(place)
        return rows

    def to_pyvista(self) -> Any:
        """The piece as a `pyvista.UnstructuredGrid` with the arrays of point_data and cell_data;
        "global_id" is marked as VTK's global ids.
        """
        kinds, offsets, nodes = self.connectivity()
        grid = grid_of(self.coordinates, offsets, nodes, kinds, self.point_data(), self.cell_data())
        for fields in (grid.GetCellData(), grid.GetPointData()):
            fields.SetActiveGlobalIds("global_id")
        return grid

    def to_mesh(self) -> Mesh:
        """The piece as a `Mesh`. Raises ValueError for an empty piece, as every empty mesh does."""
        kinds, offsets, nodes = self.connectivity()
        block = CellBlock("mixed", nodes, offsets, kinds)
        return Mesh(
            self.coordinates, [block], self.point_data(), self.cell_data(), self.cell_sets()
        )

    def to_meshio(self) -> Any:
        """The piece as a `meshio.Mesh` with the arrays of point_data and cell_data."""
        return self.to_mesh().to_meshio()

    @property
    def mesh(self) -> Any:
        """The piece in the library that the whole mesh came from: pyvista, meshio, or `Mesh`."""
        if self._whole.library == "pyvista":
            return self.to_pyvista()
        return self.to_meshio() if self._whole.library == "meshio" else self.to_mesh()

    def __repr__(self) -> str:
        ghosts = len(self.cells) - self.num_owned_cells
        return f"Piece({self.part}: {self.num_owned_cells} cells, {ghosts} ghosts)"


class Partition:
    """A mesh in pieces; iterating gives the pieces, `len` their number.

    Attributes:
        mesh: the whole mesh.
        labels: part of each cell, int32 (num_cells).
        pieces: one `Piece` per part.
        quality: see `Quality`.
        method: what made it, e.g. "rcb" or "metis + swaps".
        trials: what "auto" tried; empty for a single method.
        ghost_layers: layers of ghosts in the pieces.
    """

    def __init__(
        self,
        mesh: Mesh,
        labels: NDArray[np.int32],
        pieces: list[Any],
        quality: Quality,
        method: str = "",
        trials: list[Trial] | None = None,
        ghost_layers: int = 0,
    ) -> None:
        self.mesh = mesh
        self.labels = labels
        self.pieces = [Piece(piece, mesh) for piece in pieces]
        self.quality = quality
        self.method = method
        self.trials = trials or []
        self.ghost_layers = ghost_layers

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[Piece]:
        return iter(self.pieces)

    def __getitem__(self, part: int) -> Piece:
        return self.pieces[part]

    def __repr__(self) -> str:
        return (
            f"Partition({len(self)} pieces by {self.method}, largest halo "
            f"{self.quality.largest_halo})"
        )


def _weights(mesh: Mesh, weights: Any) -> NDArray[np.float64]:
    if weights is None:
        return np.zeros(0)
    if isinstance(weights, str):
        if weights not in mesh.cell_data:
            known = ", ".join(mesh.cell_data) or "none"
            raise ValueError(
                f"partition: the mesh has no cell data {weights!r} for the weights; it has {known}"
            )
        weights = mesh.cell_data[weights]
    if isinstance(weights, torch.Tensor):
        weights = weights.detach().cpu().numpy()
    array = np.ascontiguousarray(weights, dtype=np.float64)
    if array.shape != (mesh.num_cells,):
        raise ValueError(
            f"partition: expected weights of shape ({mesh.num_cells},), one per cell, got "
            f"{array.shape}"
        )
    return array


def partition_labels(
    mesh: Any,
    num_parts: int,
    method: str = "auto",
    weights: ArrayLike | str | None = None,
    ghost_layers: int = 0,
    *,
    tolerance: float = 0.0,
    num_threads: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
    over: DeviceMesh | None = None,
) -> NDArray[np.int32]:
    """The part of every cell, 0 .. num_parts - 1. The same at every call and for any number of
    threads. Sizes differ by at most one cell (see `partition` for weights and tolerance).

    Local; with `over` collective over that mesh: each rank passes only its range of the cells, in
    rank order, and gets the labels of those, exactly as if one rank had passed the whole.

    Args:
        mesh: a `Mesh`, a meshio mesh or a pyvista data set. With `over` this rank's cells and the
            points they need, or None where it has no cells.
        num_parts: how many parts; more than cells leaves some empty.
        method: see `partition`.
        weights: see `partition`.
        ghost_layers: must be 0: a cell can be a ghost of several parts, so no single label is
            honest. `partition` gives pieces with ghosts.
        tolerance: see `partition`.
        num_threads: 0 means one per core.
        seed: see `partition`.
        progress: told each step by name.
        over: mesh of the ranks that hold the cells in ranges; for "hilbert" and "morton" without
            weights.

    Returns:
        int32, (num_cells,); cells numbered through the blocks in order.

    Raises:
        ValueError: for arguments out of range, an unknown method, nonzero ghost_layers, or with
            `over` another method or weights; a mesh that one rank cannot use is an error on all.
        RuntimeError: for a method whose library is not there.

    Example:
        >>> partition_labels(row_of_3_cells, 2, "hilbert")
        array([0, 0, 1], dtype=int32)
    """
    if over is not None:
        if ghost_layers or weights is not None or method not in ("hilbert", "morton"):
            raise ValueError(
                'partition_labels: with the cells spread over ranks, expected method "hilbert" or '
                f'"morton" without weights and ghosts, got {method!r}; gather the mesh for others'
            )
        return label_range(mesh, num_parts, method, over, num_threads)
    find_libraries()
    whole = as_mesh(mesh)
    labels, _, _ = core.graph_label_cells(
        whole._core,
        whole_number("num_parts", num_parts),
        method,
        _weights(whole, weights),
        tolerance,
        whole_number("ghost_layers", ghost_layers),
        num_threads,
        seed,
        progress,
    )
    return labels


def partition(
    mesh: Any,
    num_parts: int,
    method: str = "auto",
    weights: ArrayLike | str | None = None,
    ghost_layers: int = 0,
    *,
    contact: str = "point",
    radius: float = 0.0,
    tolerance: float = 0.0,
    num_threads: int = 0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Partition:
    """Cuts a mesh into exactly `num_parts` pieces with ghosts, owners, global numbers and exchange
    plans. Local: every rank that calls it with the same mesh gets the same pieces, for any number
    of threads.

    Args:
        mesh: a `Mesh`, a meshio mesh or a pyvista data set.
        num_parts: how many pieces; more than cells leaves some empty.
        method: "hilbert", "morton" (space-filling curves), "rcb" (recursive coordinate bisection);
            "metis", "kahip", "scotch" where found (`methods()`); "auto" tries all of them (the
            libraries up to a million cells), keeps the one whose largest part has the smallest
            halo, and swaps border cells to lower it further.
        weights: cost of each cell, (num_cells,), or the name of a cell field.
        ghost_layers: how many layers of other parts' cells a piece also holds.
        contact: what makes cells neighbours: "point" (a shared point), "facet" (a shared face,
            edge or end), "radius" (centers at most `radius` apart).
        radius: for contact "radius", in the unit of the coordinates.
        tolerance: allowed excess over the mean load. 0 without weights: sizes differ by at most
            one cell. With weights no load exceeds (1 + tolerance) times the mean plus the heaviest
            cell.
        num_threads: 0 means one per core.
        seed: for KaHIP and Scotch.
        progress: told each step by name.

    Returns:
        The partition; `for piece in result`.

    Raises:
        ValueError: for arguments out of range or an unknown method.
        RuntimeError: for a method whose library is not there (the message says how to get it).
    """
    find_libraries()
    whole = as_mesh(mesh)
    story, pieces, quality = core.graph_cut_mesh(
        whole._core,
        whole_number("num_parts", num_parts),
        method,
        _weights(whole, weights),
        tolerance,
        contact,
        whole_number("ghost_layers", ghost_layers),
        radius,
        num_threads,
        seed,
        progress,
    )
    labels, used, trials = story
    return Partition(
        whole,
        labels,
        pieces,
        Quality(**quality),
        used,
        [Trial(*t) for t in trials],
        ghost_layers,
    )


def cut_by_labels(
    mesh: Any,
    labels: ArrayLike,
    num_parts: int | None = None,
    ghost_layers: int = 0,
    *,
    contact: str = "point",
    radius: float = 0.0,
    num_threads: int = 0,
) -> Partition:
    """Pieces of a mesh whose parts are already known: a partition from elsewhere, or the owners in
    pre-partitioned files. Local.

    Args:
        mesh: as for `partition`.
        labels: part of each cell, (num_cells,).
        num_parts: how many pieces; the largest label plus one where not given.
        ghost_layers: as for `partition`.
        contact: as for `partition`.
        radius: as for `partition`.
        num_threads: as for `partition`.

    Returns:
        The partition.

    Raises:
        ValueError: for labels that are not one per cell in 0 .. num_parts - 1; names the cell.
    """
    whole = as_mesh(mesh)
    array = np.ascontiguousarray(labels, dtype=np.int32)
    count = int(array.max(initial=-1)) + 1 if num_parts is None else num_parts
    pieces, quality = core.graph_cut_by_labels(
        whole._core, array, count, contact, ghost_layers, radius, num_threads
    )
    return Partition(
        whole, array, pieces, Quality(**quality), "given labels", ghost_layers=ghost_layers
    )
