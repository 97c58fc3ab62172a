"""Atoms in periodic cells: neighbours, and atoms and edges cut along a space-filling curve."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfield._core import core
from shardfield._mesh import core_mesh
from shardfield.graph._nodes import partition_nodes

MOST_BINS = 128


@dataclass(frozen=True)
class Neighbors:
    """Pairs of atoms, or of an atom and a periodic image, within the cutoff; both directions.

    Attributes:
        edge_index: source and target of each edge, int64 (2, num_edges).
        cell_shifts: int64 (num_edges, 3); positions[target] - positions[source] +
            cell_shifts @ cell is the vector from source to target.
    """

    edge_index: NDArray[np.int64]
    cell_shifts: NDArray[np.int64]


def neighbor_list(
    positions: Any,
    cell: Any,
    cutoff: float,
    *,
    periodic: bool | tuple[bool, bool, bool] = True,
    targets: ArrayLike | None = None,
) -> Neighbors:
    """All neighbours within the cutoff, by vesin's cell lists. Local.

    With `targets`, edges into these atoms only, in time and memory of the atoms around them: what
    one rank needs of a crystal that it does not hold edges of.

    Args:
        positions: (num_atoms, 3), array or tensor, inside the cell or not.
        cell: (3, 3), one cell vector per row; vectors that are not periodic may be 0.
        cutoff: largest distance, in the unit of the positions.
        periodic: along each cell vector.
        targets: numbers of atoms, distinct; all where not given.

    Returns:
        Edges; an atom that is its own periodic image within the cutoff has edges to itself.

    Raises:
        ValueError: for wrong shapes, positions that are not finite, a flat cell or a cutoff that
            is not positive.
        ImportError: where vesin is not installed.

    Example:
        >>> neighbor_list([[0.0, 0, 0], [1.0, 0, 0]], np.eye(3) * 9, 1.5).edge_index
        array([[0, 1], [1, 0]])
    """
    points, box, wraps = _checked(positions, cell, cutoff, periodic)
    try:
        from vesin import NeighborList
    except ImportError as error:
        raise ImportError("neighbor_list: needs vesin; pip install shardfield[atoms]") from error
    wanted = np.arange(len(points)) if targets is None else np.asarray(targets, np.int64)
    near = wanted if targets is None else _around(points, box, wraps, cutoff, wanted)
    if len(wanted) == 0:
        return Neighbors(np.zeros((2, 0), np.int64), np.zeros((0, 3), np.int64))
    pairs, shifts = NeighborList(cutoff=cutoff, full_list=True, n_threads=1).compute(
        points[near], box, wraps, "PS"
    )
    index, shifts = pairs.astype(np.int64).T, shifts.astype(np.int64)
    if targets is not None:
        is_wanted: NDArray[np.bool_] = np.zeros(len(points), bool)
        is_wanted[wanted] = True
        keep = is_wanted[near][index[1]]
        index, shifts = near[index[:, keep]], shifts[keep]
    return Neighbors(np.ascontiguousarray(index), np.ascontiguousarray(shifts))


class ShardedAtoms:
    """Atoms and their edges as sharded tensors; made by `shard_atoms`.

    Attributes:
        order: number of the atom in each row of the sharded tensors, int64 (num_atoms,).
        sizes: rows of each rank.
        positions: sharded (num_atoms, 3).
        edge_index: sharded (2, num_edges), rows of source and target; edges lie with their targets.
        cell_shifts: sharded (num_edges, 3), whole numbers in the positions' dtype.
        shifts: sharded (num_edges, 3), cell_shifts @ cell.
    """

    def __init__(self, mesh: Any, order: NDArray[np.int64], sizes: list[int]) -> None:
        self._mesh = mesh
        self.order, self.sizes = order, sizes
        self.positions: Tensor
        self.edge_index: Tensor
        self.cell_shifts: Tensor
        self.shifts: Tensor

    def __len__(self) -> int:
        return len(self.order)

    @property
    def own(self) -> NDArray[np.int64]:
        """Numbers of this rank's atoms."""
        first = sum(self.sizes[: self._mesh.rank])
        return self.order[first : first + self.sizes[self._mesh.rank]]

    def shard(self, full: Tensor) -> Tensor:
        """Values of all atoms (num_atoms, ...), the same on every rank, as a sharded tensor. Local;
        gradients do not reach `full`.
        """
        if full.dim() == 0 or full.size(0) != len(self):
            raise ValueError(
                f"ShardedAtoms.shard: expected {len(self)} rows in front, got shape "
                f"{tuple(full.shape)}"
            )
        own = torch.from_numpy(self.own.copy()).to(full.device)
        return self.wrap(full.detach().index_select(0, own))

    def wrap(self, piece: Tensor) -> Tensor:
        """Rows of this rank's atoms (len(own), ...), as a sharded tensor. Local, differentiable."""
        if piece.dim() == 0 or piece.size(0) != len(self.own):
            raise ValueError(
                f"ShardedAtoms.wrap: expected {len(self.own)} rows in front, got shape "
                f"{tuple(piece.shape)} on rank {self._mesh.rank}"
            )
        shape = [len(self), *piece.shape[1:]]
        return core.wrap(piece, self._mesh, [(0, [0], self.sizes)], shape, False)

    def gather(self, x: Tensor) -> Tensor:
        """All rows of a sharded tensor of atoms as a plain tensor in the caller's order.
        Collective.
        """
        whole: Tensor = x.full_tensor()  # type: ignore[attr-defined]
        place = torch.from_numpy(np.argsort(self.order, kind="stable"))
        return whole.index_select(0, place.to(whole.device))


def shard_atoms(
    positions: Tensor,
    cell: Any,
    cutoff: float,
    mesh: DeviceMesh,
    *,
    periodic: bool | tuple[bool, bool, bool] = True,
    method: str = "hilbert",
) -> ShardedAtoms:
    """Cuts atoms along a space-filling curve and gives every rank its atoms' edges: layers that
    gather and scatter by `edge_index` then exchange one cutoff's halo per layer, however many
    layers there are. Collective over `mesh`: edge counts are told.

    Args:
        positions: (num_atoms, 3), plain, the same on every rank.
        cell: (3, 3), one cell vector per row.
        cutoff: largest distance of neighbours.
        mesh: one axis.
        periodic: along each cell vector.
        method: "hilbert", "morton" or "rcb"; see `partition_nodes`.

    Returns:
        The sharded tensors; ranks own equally many atoms, up to one.

    Raises:
        ValueError: as `neighbor_list`, or for a mesh of several axes.
        ImportError: where vesin is not installed.
    """
    if mesh.ndim != 1:
        raise ValueError(
            f"shard_atoms: expected a mesh of one axis, got shape {tuple(mesh.mesh.shape)}; pass a "
            "submesh such as mesh['domain']"
        )
    if method not in ("hilbert", "morton", "rcb"):
        raise ValueError(f"shard_atoms: expected hilbert, morton or rcb, got {method!r}")
    ranks = core_mesh(mesh)
    points, box, wraps = _checked(positions, cell, cutoff, periodic)
    fractions = points @ np.linalg.inv(box)
    wrapped = np.where(wraps, fractions - np.floor(fractions), fractions) @ box
    nothing: NDArray[np.int64] = np.zeros((2, 0), np.int64)
    labels = partition_nodes(nothing, len(points), mesh.size(), method, coordinates=wrapped)
    sizes = np.bincount(labels, minlength=mesh.size()).tolist()
    atoms = ShardedAtoms(ranks, np.argsort(labels, kind="stable"), sizes)
    found = neighbor_list(points, box, cutoff, periodic=tuple(wraps.tolist()), targets=atoms.own)
    atoms.positions = atoms.shard(positions)
    counts = core.all_gather_ints([len(found.cell_shifts)], ranks, positions.device)
    edges = [int(row[0]) for row in counts]
    row_of = np.empty_like(atoms.order)
    row_of[atoms.order] = np.arange(len(points))
    rows = torch.from_numpy(row_of[found.edge_index]).to(positions.device)
    shifts = torch.from_numpy(found.cell_shifts).to(positions)
    vectors = shifts @ torch.from_numpy(box).to(positions)
    atoms.edge_index = core.wrap(rows, ranks, [(1, [0], edges)], [2, sum(edges)], False)
    atoms.cell_shifts, atoms.shifts = (
        core.wrap(piece, ranks, [(0, [0], edges)], [sum(edges), 3], False)
        for piece in (shifts, vectors)
    )
    return atoms


def _checked(
    positions: Any, cell: Any, cutoff: float, periodic: bool | tuple[bool, bool, bool]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.bool_]]:
    """Positions, a cell without vectors of length 0, and the periodic directions."""
    given = [v.detach().cpu().numpy() if isinstance(v, Tensor) else v for v in (positions, cell)]
    points, box = (np.array(v, np.float64) for v in given)
    if points.ndim != 2 or points.shape[1] != 3:
        raise ValueError(f"neighbor_list: expected positions (num_atoms, 3), got {points.shape}")
    if box.shape != (3, 3):
        raise ValueError(f"neighbor_list: expected a cell (3, 3), got {box.shape}")
    bad = np.flatnonzero(~np.isfinite(points).all(1))
    if len(bad):
        raise ValueError(f"neighbor_list: atom {bad[0]} is at {points[bad[0]].tolist()}")
    if not np.isfinite(cutoff) or cutoff <= 0:
        raise ValueError(f"neighbor_list: expected a positive cutoff, got {cutoff}")
    wraps = np.broadcast_to(np.asarray(periodic, bool), 3).copy()
    absent = (box == 0).all(1)
    if absent.any() and not (absent & wraps).any():
        kept = box[~absent]
        box[absent] = np.linalg.svd(kept, full_matrices=True)[2][len(kept) :]
    volume = abs(np.linalg.det(box))
    if not volume > 1e-12 * np.prod(np.linalg.norm(box, axis=1)):
        raise ValueError(
            f"neighbor_list: expected a cell with a volume, got rows {box.tolist()}; only vectors "
            "that are not periodic may be 0"
        )
    return points, box, wraps


def _around(
    points: NDArray[np.float64],
    box: NDArray[np.float64],
    wraps: NDArray[np.bool_],
    cutoff: float,
    targets: NDArray[np.int64],
) -> NDArray[np.int64]:
    """Numbers of a set of atoms that holds all neighbours of the targets: those in the targets'
    bins and the bins around them, where no bin is thinner than the cutoff.
    """
    places = points @ np.linalg.inv(box)
    heights = 1 / np.linalg.norm(np.linalg.inv(box), axis=0)
    places = np.where(wraps, places - np.floor(places), places - places.min(0))
    extents = np.where(wraps, 1.0, np.maximum(places.max(0), 1e-300))
    counts = np.clip(np.floor(extents * heights / cutoff), 1, MOST_BINS).astype(np.int64)
    bins = np.minimum((places / extents * counts).astype(np.int64), counts - 1)
    taken = np.zeros(counts, bool)
    taken[tuple(bins[targets].T)] = True
    for axis in range(3):
        ring = taken if wraps[axis] else np.pad(taken, [(int(axis == a),) * 2 for a in range(3)])
        ring = ring | np.roll(ring, 1, axis) | np.roll(ring, -1, axis)
        taken = ring if wraps[axis] else ring.take(np.arange(1, counts[axis] + 1), axis)
    return np.flatnonzero(taken[tuple(bins.T)])
