"""Published cases, kind F: how gradients are scaled and summed."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracle import arange, assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from rank_pool import mesh_of
from shardfield.domain_parallel import ShardTensor, shard_tensor, sync_module_over_mesh
from torch import nn
from torch.distributed.tensor import Shard

import shardfield.graph as graph


def sum_over_ranks(mesh) -> None:
    x = sharded(torch.ones(2, dtype=torch.float64), mesh, 0).requires_grad_()
    s = (x * sharded(arange(2) + 1, mesh, 0)).sum()
    (1 * s + 2 * s).backward()
    assert full(x.grad).tolist() == [3, 6]


def test_F1_sums_over_ranks_keep_their_gradient(run_mesh):
    run_mesh((2,), sum_over_ranks)


def gather_of_a_transpose(mesh) -> None:
    x = ShardTensor.from_local(arange(2, 3), mesh, [Shard(1)]).requires_grad_()
    weight = torch.cat([arange(3, 2), arange(3, 2) * 2])
    whole = x.t().full_tensor()
    (2 * (whole * weight).sum()).backward()
    scale = mesh.get_local_rank() + 1
    assert x.grad.to_local().tolist() == [
        [0, 4 * scale, 8 * scale],
        [2 * scale, 6 * scale, 10 * scale],
    ]


def test_F3_gather_of_a_strided_tensor(run_mesh):
    run_mesh((2,), gather_of_a_transpose)


def row_split_linear(mesh) -> None:
    x = sharded(arange(1, 4) + 1, mesh, 1)
    w = torch.ones(1, 4, dtype=torch.float64, requires_grad=True)
    b = torch.ones(1, dtype=torch.float64, requires_grad=True)
    y = F.linear(x, w, b)
    assert full(y).item() == 11
    y.sum().backward()
    assert b.grad.item() == 1
    assert w.grad.tolist() == [[1, 2, 3, 4]]
    check_same_as_serial(
        F.linear,
        [numbers(3, 4)],
        mesh,
        [Shard(1)],
        plain=[numbers(2, 4, seed=1), numbers(2, seed=2)],
    )


def test_F5_bias_is_added_once(run_mesh):
    run_mesh((4,), row_split_linear)


def data_times_domain() -> None:
    from torch.nn.parallel import DistributedDataParallel

    mesh = mesh_of((2, 2), ("data", "domain"))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(1, 4, 3, padding=1), nn.GELU(), nn.Conv1d(4, 1, 5, padding=2))
    net = net.double()
    serial = copy.deepcopy(net)
    samples = numbers(2, 1, 9)
    (serial(samples) ** 2).mean().backward()
    mine = shard_tensor(samples[mesh.get_local_rank(0)][None], mesh["domain"], [Shard(2)])
    model = DistributedDataParallel(net, process_group=mesh["data"].get_group())
    (model(mine) ** 2).mean().backward()
    for (name, p), q in zip(net.named_parameters(), serial.parameters(), strict=True):
        assert_equal(p.grad, q.grad, name)


def test_F7_gradients_are_not_scaled_by_the_domain_size(run_ranks):
    run_ranks(4, data_times_domain)


def forces(mesh) -> None:
    x = shard_tensor(arange(4) + 1, mesh, [Shard(0)]).requires_grad_()
    energy = (x * x).sum()
    (gradient,) = torch.autograd.grad(energy, x)
    assert full(-gradient).tolist() == [-2, -4, -6, -8]


def test_F9_forces_do_not_depend_on_the_rank_count(run_mesh):
    for ranks in (1, 2, 4):
        run_mesh((ranks,), forces)


def forces_by_plans(mesh, path: str) -> None:
    """Each pair of cells pulls with half of both energies, by rows that a plan has brought.

    The plan is in memory, pickled, or built from the files of the pieces.
    """
    line = graph.Mesh([[0.0], [1], [2], [3], [4]], [("line", [[0, 1], [1, 2], [2, 3], [3, 4]])])
    piece = graph.partition(line, mesh.size(), "hilbert", ghost_layers=1)[mesh.get_rank()]
    stored = graph.read_partition(path)[mesh.get_rank()]
    plan = piece.cell_exchange
    for reloaded in (pickle.loads(pickle.dumps(plan)), stored.cell_exchange):
        assert reloaded.receives == plan.receives
        for part, rows in plan.sends.items():
            assert reloaded.sends[part].tolist() == rows.tolist()
        for used in (plan, reloaded):
            own = (piece.cells[: used.num_owned] + 1).astype(float)
            x = ShardTensor.from_local(torch.from_numpy(own), mesh, [Shard(0)]).requires_grad_()
            rows = used.fetch(x, mesh)
            assert rows.tolist() == (piece.cells + 1).tolist()
            copies = torch.tensor([[1, 2, 2, 1][c - 1] for c in (piece.cells + 1)])  # of its pairs
            pairs = [
                (i, j)
                for i, a in enumerate(piece.cells)
                for j, b in enumerate(piece.cells)
                if b == a + 1 and min(piece.cell_owners[i], piece.cell_owners[j]) == piece.part
            ]
            each = rows.square() / copies
            mine = sum((each[i] + each[j] for i, j in pairs), each.sum() * 0)
            energy = ShardTensor.from_local(mine[None], mesh, [Shard(0)]).sum()
            assert energy.item() == 30
            assert full(-torch.autograd.grad(energy, x)[0]).tolist() == [-2, -4, -6, -8]


def test_F9_forces_by_plans_that_were_stored(run_mesh, tmp_path):
    line = graph.Mesh([[0.0], [1], [2], [3], [4]], [("line", [[0, 1], [1, 2], [2, 3], [3, 4]])])
    for ranks in (1, 2, 4):
        path = tmp_path / f"{ranks}.pvtu"
        graph.write_mesh(path, graph.partition(line, ranks, "hilbert", ghost_layers=1))
        run_mesh((ranks,), forces_by_plans, path=str(path))


def forces_of_a_halo_graph(mesh) -> None:
    """The same by edges in a ring, from a graph in memory and one that was pickled."""
    labels = np.arange(4) * mesh.size() // 4
    whole = graph.HaloGraph([[0, 1, 2, 3], [1, 2, 3, 0]], 4, labels)
    for halo in (whole, pickle.loads(pickle.dumps(whole))):
        assert halo.faults() == []
        here = halo.on(mesh)
        x = here.shard_nodes(arange(4, 1) + 1).requires_grad_()
        energy = here.sources(x).square().sum()
        assert energy.item() == 30
        force = -torch.autograd.grad(energy, x)[0]
        assert here.gather_nodes(force).flatten().tolist() == [-2, -4, -6, -8]


def test_F9_forces_by_a_halo_graph_that_was_stored(run_mesh):
    for ranks in (1, 2, 4):
        run_mesh((ranks,), forces_of_a_halo_graph)


def norm_over_both_kinds(mesh) -> None:
    plain = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    cut = nn.Parameter(sharded(torch.zeros(4, dtype=torch.float64), mesh, 0))
    plain.grad = torch.tensor([3.0, 4.0], dtype=torch.float64)
    cut.grad = sharded(torch.ones(4, dtype=torch.float64), mesh, 0)
    total = nn.utils.clip_grad_norm_([plain, cut], max_norm=1.0)
    assert float(total) == pytest.approx(5.38516, abs=1e-5)
    scale = 1 / (29**0.5 + 1e-6)
    assert plain.grad.tolist() == pytest.approx([3 * scale, 4 * scale])
    assert full(cut.grad).tolist() == pytest.approx([scale] * 4)


def test_F11_gradient_norm_counts_everything_once(run_mesh):
    run_mesh((4,), norm_over_both_kinds)


def cross_product(mesh) -> None:
    a = sharded(arange(2, 3), mesh, 0).requires_grad_()
    b = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64, requires_grad=True)
    out = torch.linalg.cross(a, b.expand(2, 3))
    assert full(out).tolist() == [[-1, 2, -1], [2, -4, 2]]
    out.sum().backward()
    assert b.grad.tolist() == [2, -4, 2] and not is_sharded(b.grad)


def test_F13_gradient_of_the_plain_operand_of_a_cross_product(run_mesh):
    run_mesh((2,), cross_product)


def spatial_mean(mesh) -> None:
    x = shard_tensor(arange(8), mesh, [Shard(0)]).requires_grad_()
    (x.mean() ** 2).backward()
    assert full(x.grad).tolist() == [0.875] * 8


def test_F15_reduced_loss_keeps_its_gradient(run_mesh):
    run_mesh((2,), spatial_mean)


class Masked(nn.Module):
    """A module that keeps a sharded mask as a buffer."""

    def __init__(self, mask: torch.Tensor):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1, dtype=torch.float64))
        self.register_buffer("mask", mask)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.mask * self.weight).sum()


def masks_survive(mesh) -> None:
    x = sharded(arange(4) + 1, mesh, 0)
    net = Masked(sharded(torch.tensor([1.0, 0, 0, 1], dtype=torch.float64), mesh, 0))
    assert float(net(x)) == 5
    sync_module_over_mesh(net, mesh)
    assert is_sharded(net.mask)
    assert float(net(x)) == 5


def test_F17_sharded_buffers_are_left_alone(run_mesh):
    run_mesh((2,), masks_survive)


def saved_values_survive(mesh) -> None:
    x = sharded(torch.ones(2, dtype=torch.float64), mesh, 0).requires_grad_()
    y = 2 * x
    z = (y * y).sum()
    y.detach().sum(), y.detach().full_tensor(), y.detach().mean()
    y.detach().redistribute(placements=[Shard(0)])
    z.backward(retain_graph=True)
    assert full(x.grad).tolist() == [8, 8]
    with torch.no_grad():
        y.to_local().mul_(3)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.backward()


def test_F19_values_saved_for_backward_are_never_changed_silently(run_mesh):
    run_mesh((2,), saved_values_survive)
