"""CASES, kind M: values across the borders of meshes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.distributed as dist

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
