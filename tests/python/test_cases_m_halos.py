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
