"""CASES, kind M: values across the borders of meshes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.distributed as dist
from oracle import is_sharded

import shardfield
import shardfield.graph as graph


def line_of_4():
    return graph.Mesh([[0.0], [1], [2], [3], [4]], [("line", [[0, 1], [1, 2], [2, 3], [3, 4]])])


def fetch_ghosts(plan, values):
    """Ghost rows take their owners' values, by point-to-point messages of this plan."""
    outgoing = {p: values[torch.from_numpy(rows)].contiguous() for p, rows in plan.sends.items()}
    incoming = {p: torch.empty_like(values[rows]) for p, rows in plan.receives.items()}
    work = [dist.P2POp(dist.isend, data, peer) for peer, data in outgoing.items()]
    work += [dist.P2POp(dist.irecv, data, peer) for peer, data in incoming.items()]
    for request in dist.batch_isend_irecv(work) if work else []:
        request.wait()
    out = values.clone()
    for peer, data in incoming.items():
        out[plan.receives[peer]] = data
    return out


def jumps_across_facets():
    """Sum of squared jumps of 0, 1, 4, 9, each facet counted by the lower owner of its cells."""
    rank, world = dist.get_rank(), dist.get_world_size()
    piece = graph.partition(line_of_4(), world, "hilbert", ghost_layers=1)[rank]
    field = torch.tensor([0.0, 1, 4, 9], dtype=torch.float64)
    values = torch.full((len(piece.cells),), torch.nan, dtype=torch.float64)
    own = piece.num_owned_cells
    values[:own] = field[torch.from_numpy(piece.cells[:own])]
    values = fetch_ghosts(piece.cell_exchange, values)
    total = torch.zeros((), dtype=torch.float64)
    place = {cell: i for i, cell in enumerate(piece.cells.tolist())}
    for cell, i in place.items():
        j = place.get(cell + 1)
        if j is not None and min(piece.cell_owners[i], piece.cell_owners[j]) == rank:
            total += (values[j] - values[i]) ** 2
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize("world", [1, 2, 4])
def test_m1_interior_facets_need_ghosts(run_ranks, world):
    assert run_ranks(world, jumps_across_facets) == [35.0] * world


def diffuse(path):
    """Steady diffusion on pieces read from files: ends at 1 and 0, half a cell beyond the border."""
    piece = graph.read_partition(path)[dist.get_rank()]
    own = piece.num_owned_cells
    place = {cell: i for i, cell in enumerate(piece.cells.tolist())}
    value = torch.zeros(len(piece.cells), dtype=torch.float64)
    for _ in range(400):
        value = fetch_ghosts(piece.cell_exchange, value)
        new = value.clone()
        for cell, i in list(place.items())[:own]:
            sides = [
                (1.0, value[place[cell - 1]]) if cell > 0 else (2.0, torch.tensor(1.0)),
                (1.0, value[place[cell + 1]]) if cell < 3 else (2.0, torch.tensor(0.0)),
            ]
            new[i] = sum(w * v for w, v in sides) / sum(w for w, _ in sides)
        value = new
    whole = torch.zeros(4, dtype=torch.float64)
    whole[torch.from_numpy(piece.cells[:own])] = value[:own]
    dist.all_reduce(whole)
    return whole.tolist()


def test_m3_pieces_from_files_are_coupled_across_the_seam(run_ranks, tmp_path):
    graph.write_mesh(tmp_path / "line.pvtu", graph.partition(line_of_4(), 2, ghost_layers=1))
    for answer in run_ranks(2, diffuse, path=str(tmp_path / "line.pvtu")):
        np.testing.assert_allclose(answer, [0.875, 0.625, 0.375, 0.125], atol=1e-12)


def star(mesh):
    """0 -> 1, 2, 3 cut into {0, 1} and {2, 3}."""
    here = graph.HaloGraph([[0, 0, 0], [1, 2, 3]], 4, [0, 0, 1, 1]).on(mesh)
    seen = here.gather_edges(here.sources(here.out_degrees()[:, None]))
    x = here.shard_nodes(torch.arange(1.0, 5.0, dtype=torch.float64)[:, None])
    scale = 1 / here.out_degrees().double()[:, None].clamp(min=1).sqrt()
    symmetric = (
        here.aggregate(here.sources(x * scale))
        / here.in_degrees().double()[:, None].clamp(min=1).sqrt()
    )
    parts = [here.aggregate(here.sources(x), r) for r in ("mean", "max")]
    return [here.gather_nodes(t).flatten().tolist() for t in (symmetric, *parts)] + [
        seen.flatten().tolist()
    ]


def test_m5_degrees_and_aggregators_of_a_star(run_mesh):
    third = 1 / 3**0.5
    for symmetric, mean, largest, seen in run_mesh((2,), star):
        np.testing.assert_allclose(symmetric, [0, third, third, third])
        assert mean == largest == [0, 1, 1, 1]
        assert seen == [3, 3, 3]


PARTICLES, CUTOFF, STEPS = 24, 2.5, 20


def fractions_of_step(step: int) -> np.ndarray:
    """Where the particles are in the box; number 0 crosses it and one side of it."""
    places = np.random.default_rng(7).random((PARTICLES, 3))
    places[0] = 0.05 + 1.1 * step / (STEPS - 1), 0.4, 0.6
    return places


def pair_energy(squares: torch.Tensor) -> torch.Tensor:
    """Not smooth at the cutoff: a lost, stale or doubled pair shows."""
    return (1 / (1 + squares)).sum() / 2


def energy_of_all_images(positions: torch.Tensor, side: float) -> torch.Tensor:
    """All pairs of all images around, no neighbour list."""
    shifts = torch.cartesian_prod(*[torch.arange(-1.0, 2)] * 3).double() * side
    arrows = positions[:, None, None] - positions[None, :, None] + shifts
    squares = arrows.square().sum(-1)
    counted = squares <= CUTOFF**2
    counted[range(PARTICLES), range(PARTICLES), 13] = False  # the particle itself, not its images
    return pair_energy(squares[counted])


def energies_in_a_shrinking_box(mesh):
    """Energy and forces of every step on the ranks and serially, and each rank's particles."""
    energies, own = [], []
    for step in range(STEPS):
        side = 10.0 * 0.99**step
        positions = torch.from_numpy(fractions_of_step(step) * side)
        atoms = graph.shard_atoms(positions, np.eye(3) * side, CUTOFF, mesh)
        x, links = atoms.positions.requires_grad_(), atoms.edge_index
        with shardfield.report() as report:
            arrows = x[links[1]] - x[links[0]] + atoms.shifts
            energy = pair_energy(arrows.square().sum(1))
            energy.backward()
        assert not report.fallbacks, dict(report.fallbacks)
        want = energy_of_all_images(positions.requires_grad_(), side)
        want.backward()
        torch.testing.assert_close(atoms.gather(x.grad), positions.grad, rtol=1e-10, atol=1e-12)
        energies.append((energy.item(), want.item()))
        own.append(atoms.own.tolist())
    return energies, own


@pytest.mark.parametrize("size", [2, 3])
def test_m7_a_particle_crosses_borders_of_a_shrinking_box(run_mesh, size):
    answers = run_mesh((size,), energies_in_a_shrinking_box)
    for energies, _ in answers:
        np.testing.assert_allclose(*zip(*energies, strict=True), rtol=1e-12)
    assert len({round(want, 6) for _, want in answers[0][0]}) == STEPS
    homes = set()
    for step in range(STEPS):
        held = [own[step] for _, own in answers]
        assert sorted(itertools.chain.from_iterable(held)) == list(range(PARTICLES))
        homes.add(next(rank for rank, numbers in enumerate(held) if 0 in numbers))
    assert len(homes) > 1


def four_nodes(mesh):
    here = graph.HaloGraph([[0, 1], [1, 2]], 4, [0, 0, 1, 1]).on(mesh)
    out = here.aggregate(here.sources(here.shard_nodes(torch.ones(4, 2))))
    return list(out.shape), here.gather_nodes(out).tolist()


def test_m9_isolated_tail_nodes_have_rows(run_mesh):
    for shape, rows in run_mesh((2,), four_nodes):
        assert shape == [4, 2]
        assert rows == [[0, 0], [1, 1], [1, 1], [0, 0]]


def all_on_one_rank(mesh):
    here = graph.HaloGraph([[0, 1, 2], [1, 2, 0]], 3, [0, 0, 0], num_parts=3).on(mesh)
    x = here.shard_nodes(torch.tensor([[1.0], [2], [4]], dtype=torch.float64)).requires_grad_()
    energy = (here.sources(x) * here.targets(x)).sum()
    energy.backward()
    return energy.item(), here.gather_nodes(x.grad).flatten().tolist()


def test_m11_ranks_without_nodes_or_edges(run_mesh):
    for energy, grad in run_mesh((3,), all_on_one_rank):
        assert energy == 14.0
        assert grad == [6.0, 5.0, 3.0]


LINE = [2, 3, 3, 3, 3, 3, 3, 2]
SHUFFLED = [5, 0, 7, 2, 6, 1, 3, 4]
RADIUS = 1.5


def on_a_line(order) -> torch.Tensor:
    points = torch.zeros(8, 3, dtype=torch.float64)
    points[:, 0] = torch.tensor(order, dtype=torch.float64)
    return points


def cuts_of_eight(ranks: int) -> list[list[int]]:
    """Labels of the points: even, one alone, the first rank empty, every other, drawn."""
    alone = [0] + [ranks - 1] * 7
    drawn = np.random.default_rng(ranks).integers(0, ranks, 8).tolist()
    return [
        [i * ranks // 8 for i in range(8)],
        alone,
        [ranks - 1] * 8,
        [i % ranks for i in range(8)],
        drawn,
    ]


def counts_within_the_radius(mesh, order, method):
    """Points within the radius, itself among them, from edges cut with `method`."""
    atoms = graph.shard_atoms(
        on_a_line(order), np.zeros((3, 3)), RADIUS, mesh, periodic=False, method=method
    )
    ones = torch.ones_like(atoms.shifts[:, 0])
    found = torch.ones_like(atoms.positions[:, 0]).index_add(0, atoms.edge_index[1], ones)
    assert is_sharded(found)
    return atoms.gather(found).tolist()


def counts_of_any_cut(mesh, order):
    """The same for cuts of the caller: each rank's own search, and a halo graph of all edges."""
    points, out = on_a_line(order), []
    whole = graph.neighbor_list(points, np.zeros((3, 3)), RADIUS, periodic=False).edge_index
    for labels in cuts_of_eight(mesh.size()):
        own = np.flatnonzero(np.array(labels) == mesh.get_rank())
        mine = graph.neighbor_list(
            points, np.zeros((3, 3)), RADIUS, periodic=False, targets=own
        ).edge_index[1]
        counts = torch.from_numpy(np.bincount(mine, minlength=8))
        dist.all_reduce(counts)
        out.append((counts + 1).tolist())
        here = graph.HaloGraph(whole, 8, labels, mesh.size()).on(mesh)
        ones = here.shard_nodes(torch.ones(8, 1, dtype=torch.float64))
        near = here.aggregate(here.sources(ones)) + 1
        out.append(here.gather_nodes(near).flatten().tolist())
    return out


@pytest.mark.parametrize("order", [list(range(8)), SHUFFLED], ids=["sorted", "unsorted"])
def test_m13_radius_search_over_any_cut(run_mesh, ranks, order):
    want = [LINE[i] for i in order]
    for method in ("hilbert", "morton", "rcb"):
        for counts in run_mesh((ranks,), counts_within_the_radius, order=order, method=method):
            assert counts == want
    for every_cut in run_mesh((ranks,), counts_of_any_cut, order=order):
        assert every_cut == [want] * 10
