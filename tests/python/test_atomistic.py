"""Neighbours in periodic cells, atoms cut over ranks, and MACE from PyPI unchanged on them."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from matscipy.neighbours import neighbour_list
from oracle import assert_equal, full, is_sharded

import shardfield
from shardfield import graph

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "python"
if str(EXAMPLES) not in sys.path:
    sys.path.insert(0, str(EXAMPLES))  # the ranks import this file too

from atomistic.on_ranks import SumsOnOwners, sharded_inputs, whole_inputs  # noqa: E402
from atomistic.quartz import quartz  # noqa: E402

CUTOFF = 4.0
CELLS = {
    "cube": np.eye(3) * 9,
    "skewed": np.array([[9.0, 0, 0], [3, 10, 0], [-2, 1, 11]]),
    "thinner than the cutoff": np.diag([2.0, 9, 9]),
}


def as_set(index, shifts) -> set:
    """Edges as a set; none may occur twice."""
    rows = list(map(tuple, np.concatenate([index, np.asarray(shifts).T]).T.tolist()))
    assert len(rows) == len(set(rows))
    return set(rows)


@pytest.mark.parametrize("periodic", [(True, True, True), (True, False, True), (False,) * 3])
@pytest.mark.parametrize("cell", CELLS)
def test_neighbours_equal_those_of_matscipy(cell, periodic):
    """Atoms inside and outside of the cell, all edges and those into some atoms."""
    rng = np.random.default_rng(0)
    positions, box = rng.normal(size=(60, 3)) * 6, CELLS[cell]
    got = graph.neighbor_list(positions, box, 2.7, periodic=periodic)
    first, second, shifts = neighbour_list(
        "ijS", pbc=periodic, cell=box, positions=positions, cutoff=2.7
    )
    assert as_set(got.edge_index, got.cell_shifts) == as_set(np.stack([first, second]), shifts)
    some = rng.permutation(60)[:17]
    part = graph.neighbor_list(positions, box, 2.7, periodic=periodic, targets=some)
    into = np.isin(got.edge_index[1], some)
    want = as_set(got.edge_index[:, into], got.cell_shifts[into])
    assert as_set(part.edge_index, part.cell_shifts) == want


def test_quartz_has_its_bonds():
    """Each silicon among four oxygens, each oxygen between two silicons."""
    crystal = quartz(2, 2, 2)
    found = graph.neighbor_list(crystal.positions, crystal.cell.array, 2.0)
    bonds = np.bincount(found.edge_index[1])
    assert bonds[crystal.numbers == 14].tolist() == [4] * 24
    assert bonds[crystal.numbers == 8].tolist() == [2] * 48


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"positions": np.zeros((4, 2))}, r"expected positions \(num_atoms, 3\), got \(4, 2\)"),
        ({"positions": np.full((4, 3), np.nan)}, "atom 0 is at"),
        ({"cell": np.eye(2)}, r"expected a cell \(3, 3\)"),
        ({"cell": np.diag([1.0, 1, 0])}, "expected a cell with a volume"),
        ({"cutoff": 0.0}, "expected a positive cutoff, got 0.0"),
    ],
)
def test_errors_say_what_is_wrong(change, words):
    arguments = {"positions": np.zeros((4, 3)), "cell": np.eye(3), "cutoff": 1.0, **change}
    with pytest.raises(ValueError, match=words):
        graph.neighbor_list(**arguments)


def test_molecules_need_no_cell():
    water = [[0.0, 0, 0], [0.96, 0, 0], [-0.24, 0.93, 0]]
    found = graph.neighbor_list(water, np.zeros((3, 3)), 1.2, periodic=False)
    assert as_set(found.edge_index, found.cell_shifts) == {
        (a, b, 0, 0, 0) for a, b in ((0, 1), (1, 0), (0, 2), (2, 0))
    }


def cut(mesh) -> None:
    """Every edge on its target's rank, exactly once; rows there and back; ranks without atoms."""
    for crystal, cutoff in ((quartz(2, 2, 1), 3.0), (quartz(1, 1, 1)[:2], 6.0)):
        positions = torch.from_numpy(crystal.positions)
        atoms = graph.shard_atoms(positions, crystal.cell.array, cutoff, mesh)
        assert max(atoms.sizes) - min(atoms.sizes) <= 1
        assert_equal(atoms.gather(atoms.positions), positions, "positions")
        rows, shifts = full(atoms.edge_index).numpy(), full(atoms.cell_shifts).numpy()
        whole = graph.neighbor_list(positions, crystal.cell.array, cutoff)
        want = as_set(whole.edge_index, whole.cell_shifts)
        assert as_set(atoms.order[rows], shifts.astype(int)) == want
        own = atoms.edge_index.to_local()[1] - sum(atoms.sizes[: mesh.get_rank()])
        assert ((own >= 0) & (own < len(atoms.own))).all()
        ends = atoms.positions[atoms.edge_index[1]] - atoms.positions[atoms.edge_index[0]]
        assert full((ends + atoms.shifts).norm(dim=1)).max() <= cutoff
    with pytest.raises(ValueError, match="expected 2 rows in front"):
        atoms.shard(torch.zeros(3))
    with pytest.raises(ValueError, match="expected hilbert, morton or rcb"):
        graph.shard_atoms(positions, crystal.cell.array, cutoff, mesh, method="metis")


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_atoms_and_edges_are_cut_exactly(run_mesh, size):
    run_mesh((size,), cut)


def small_mace() -> torch.nn.Module:
    """On the ranks only: MACE takes seconds to import."""
    import mace_packages  # noqa: F401
    from atomistic.model import small_mace as make

    return make(CUTOFF)


def mace(mesh) -> dict[str, int]:
    """Energy, forces and stress, and the gradient of a loss of forces (a second derivative)."""
    crystal, model = quartz(2, 2, 1), small_mace()
    want = model(whole_inputs(crystal, CUTOFF), training=True, compute_stress=True)
    want["forces"].square().sum().backward()
    gradients = [p.grad.clone() if p.grad is not None else None for p in model.parameters()]
    model.zero_grad()
    data, atoms = sharded_inputs(crystal, CUTOFF, mesh)
    with shardfield.report() as report, SumsOnOwners(atoms):
        got = model(data, training=True, compute_stress=True)
        got["forces"].square().sum().backward()
    for name in ("energy", "interaction_energy", "stress"):
        assert_equal(got[name], want[name], name, rtol=1e-9)
    for name in ("forces", "node_energy", "node_feats"):
        assert is_sharded(got[name])
        assert_equal(atoms.gather(got[name]), want[name], name, rtol=1e-9)
    for (name, p), wanted in zip(model.named_parameters(), gradients, strict=True):
        if wanted is not None:
            assert_equal(p.grad, wanted, f"gradient of {name}", rtol=1e-8)
    return dict(report.fallbacks)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_mace_equals_serial(run_mesh, size):
    assert run_mesh((size,), mace) == [{}] * size, "nothing is gathered"


def peaks(mesh) -> tuple[int, int]:
    """Peak bytes of energies and forces: on one device (measured by rank 0), and on this rank."""
    from brain.memory import peak_memory

    crystal, model = quartz(3, 3, 2), small_mace()
    model(whole_inputs(quartz(2, 1, 1), CUTOFF))
    serial = 0
    if mesh.get_rank() == 0:
        with peak_memory() as peak:
            model(whole_inputs(crystal, CUTOFF))
        serial = peak.bytes
    with peak_memory() as own:
        data, atoms = sharded_inputs(crystal, CUTOFF, mesh)
        with SumsOnOwners(atoms):
            model(data)
    return serial, own.bytes


def test_a_rank_holds_its_share(run_mesh):
    """A quarter of one device's peak, and little more: halos live for one layer's gather."""
    measured = run_mesh((4,), peaks, limit_s=240)
    serial = measured[0][0]
    assert serial > 0
    for _, own in measured:
        assert 0 < own <= 0.29 * serial


def example(mesh) -> float:
    import mace_packages  # noqa: F401
    from mace_quartz import compare

    return compare(mesh, [2, 2, 1], CUTOFF)


def test_the_example_compares_with_one_device(run_mesh):
    assert all(worst <= 1e-9 for worst in run_mesh((2,), example))
