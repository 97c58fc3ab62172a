"""MACE's inputs for the whole crystal, and for atoms that are cut over ranks."""

from __future__ import annotations

import sys
from typing import Any

import torch
from ase import Atoms
from shardfield.domain_parallel import ShardTensor
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardfield.graph import ShardedAtoms, neighbor_list, shard_atoms

from .quartz import one_hot


def whole_inputs(crystal: Atoms, cutoff: float) -> dict[str, Tensor]:
    """What MACE takes, for one device."""
    found = neighbor_list(
        crystal.positions, crystal.cell.array, cutoff, periodic=tuple(crystal.pbc.tolist())
    )
    cell = torch.from_numpy(crystal.cell.array)
    shifts = torch.from_numpy(found.cell_shifts).double()
    return {
        "positions": torch.from_numpy(crystal.positions.copy()),
        "node_attrs": one_hot(crystal.numbers),
        "edge_index": torch.from_numpy(found.edge_index),
        "unit_shifts": shifts,
        "shifts": shifts @ cell,
        **_one_graph(cell, torch.zeros(len(crystal), dtype=torch.int64)),
    }


def sharded_inputs(
    crystal: Atoms, cutoff: float, mesh: DeviceMesh
) -> tuple[dict[str, Tensor], ShardedAtoms]:
    """The same on the ranks of a mesh: atoms cut along a Hilbert curve, edges with their targets.
    Collective.
    """
    positions = torch.from_numpy(crystal.positions)
    atoms = shard_atoms(
        positions, crystal.cell.array, cutoff, mesh, periodic=tuple(crystal.pbc.tolist())
    )
    data = {
        "positions": atoms.positions,
        "node_attrs": atoms.wrap(one_hot(crystal.numbers[atoms.own])),
        "edge_index": atoms.edge_index,
        "unit_shifts": atoms.cell_shifts,
        "shifts": atoms.shifts,
        **_one_graph(
            torch.from_numpy(crystal.cell.array),
            atoms.wrap(torch.zeros(len(atoms.own), dtype=torch.int64)),
        ),
    }
    return data, atoms


def _one_graph(cell: Tensor, batch: Tensor) -> dict[str, Tensor]:
    return {"cell": cell, "batch": batch, "ptr": torch.tensor([0, batch.shape[0]])}


class SumsOnOwners:
    """Keeps MACE's sums over edges cut as the atoms are: `with SumsOnOwners(atoms): model(data)`.

    MACE's scatter_sum adds into `torch.zeros(number of atoms, ...)`, a plain tensor that every rank
    would hold whole. Inside of the block sums over edges are added into sharded rows instead.
    """

    def __init__(self, atoms: ShardedAtoms) -> None:
        self._atoms = atoms

    def __enter__(self) -> None:
        from mace.tools import scatter

        plain = scatter.scatter_sum
        self._handle = ShardTensor.register_function_handler(plain, self._sum)
        self._holders = [m for m in sys.modules.values() if vars(m).get("scatter_sum") is plain]
        for module in self._holders:
            module.scatter_sum = scatter.scatter_sum
        self._plain = plain

    def __exit__(self, *_: object) -> None:
        self._handle.remove()
        for module in self._holders:
            module.scatter_sum = self._plain

    def _sum(self, func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        def call(
            src: Tensor, index: Tensor, dim: int = -1, out: Any = None, dim_size: int | None = None
        ) -> Tensor:
            if src.shape[0] != self._atoms.edge_index.shape[1] or dim_size != len(self._atoms):
                return func(src, index, dim=dim, out=out, dim_size=dim_size)
            rows = src.to_local().new_zeros(len(self._atoms.own), *src.shape[1:])
            return self._atoms.wrap(rows).index_add(0, index, src)

        return call(*args, **kwargs)
