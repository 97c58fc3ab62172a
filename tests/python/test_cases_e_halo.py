"""Published cases, kind E: exchanges between neighbours, and their adjoints."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import Cut, arange, assert_equal, check_same_as_serial, full, is_sharded, numbers
from shardfield.domain_parallel import scatter_tensor, shard_tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard

import shardfield


def groups_off_rank_zero() -> None:
    rank = dist.get_rank()
    w = torch.ones(1, 1, 3, dtype=torch.float64)
    for members in ([2, 3], [1, 2], [0, 3]):
        mesh = DeviceMesh("cpu", torch.tensor(members))
        if rank in members:
            assert mesh.get_local_rank() == members.index(rank)
            x = shard_tensor(arange(1, 1, 8), mesh, [Shard(2)])
            start = 4 * members.index(rank)
            assert x.to_local().flatten().tolist() == list(range(start, start + 4)), members
            y = F.conv1d(x, w, padding=1)
            assert full(y).flatten().tolist() == [1, 3, 6, 9, 12, 15, 18, 13], members
            check_same_as_serial(
                lambda t, v: F.conv1d(t, v, padding=1),
                [arange(1, 1, 8)],
                mesh,
                [Shard(2)],
                plain=[w],
            )
            source = members[1]
            z = scatter_tensor(
                arange(1, 1, 8) if rank == source else None, source, mesh, [Shard(2)]
            )
            assert_equal(z, arange(1, 1, 8), f"scattered from rank {source} of {members}")
    backwards = DeviceMesh("cpu", torch.tensor([3, 0]))  # torch numbers its group the other way
    if rank in (0, 3):
        try:
            x = shard_tensor(arange(1, 1, 8), backwards, [Shard(2)])
        except RuntimeError as error:
            assert "order" in str(error), error
        else:
            assert x.to_local().flatten().tolist()[0] == (0 if rank == 3 else 4)
            assert_equal(
                F.conv1d(x, w, padding=1), F.conv1d(arange(1, 1, 8), w, padding=1), "[3, 0]"
            )


def test_E1_groups_that_do_not_start_at_rank_zero(run_ranks):
    run_ranks(4, groups_off_rank_zero)


def dot_test(mesh, function, x: torch.Tensor, placements, sizes=None) -> None:
    """<y, A x> == <A^T y, x> and A x equal to serial, for a linear A."""
    check_same_as_serial(
        function, [Cut(x, placements, {0: sizes} if sizes else {})], mesh, second=False
    )
    from oracle import scatter

    ours = scatter(Cut(x, placements, {0: sizes} if sizes else {}), mesh).requires_grad_()
    out = function(ours)
    y = numbers(*out.shape, seed=5)
    left = (out * y).sum()
    (adjoint,) = torch.autograd.grad(left, ours)
    right = (adjoint * x).sum()
    assert float(left) == pytest.approx(float(right), rel=1e-12)


def adjoints(mesh) -> None:
    x = arange(1, 1, 6) * 0 + 1
    ones = torch.ones(1, 1, 3, dtype=torch.float64)
    # Pieces of two with a halo of width 1 hold 3 + 4 + 3 = 10 ones; the adjoint counts copies.
    for width, ends in itertools.product((1, 2, 3), ("constant", "circular", "reflect")):
        w = numbers(1, 1, 2 * width + 1, seed=width)
        for sizes in ([2, 2, 2], [3, 0, 3], [0, 1, 5], [6, 0, 0]):
            dot_test(
                mesh,
                lambda t, w=w, n=width, ends=ends: F.conv1d(F.pad(t, (n, n), mode=ends), w),
                numbers(1, 1, 6),
                [Shard(2)],
                sizes,
            )
    t = shard_tensor(x, mesh, [Shard(2)]).requires_grad_()
    F.conv1d(t, ones, padding=1).sum().backward()
    assert full(t.grad).flatten().tolist() == [2, 3, 3, 3, 3, 2]


def adjoints_2d(mesh) -> None:
    for width, ends in itertools.product((1, 2), ("constant", "circular", "reflect", "replicate")):
        w = numbers(1, 2, 2 * width + 1, 2 * width + 1, seed=width)
        dot_test(
            mesh,
            lambda t, w=w, n=width, ends=ends: F.conv2d(F.pad(t, (n, n, n, n), mode=ends), w),
            numbers(1, 2, 7, 6),
            [Shard(2), Shard(3)],
        )


def test_E3_adjoint_of_every_exchange(run_mesh):
    run_mesh((3,), adjoints)
    run_mesh((2, 2), adjoints_2d)


def corners(mesh) -> None:
    x = shard_tensor(arange(1, 1, 4, 4), mesh, [Shard(2), Shard(3)])
    w = torch.ones(1, 1, 3, 3, dtype=torch.float64)
    assert full(F.conv2d(x, w)).flatten().tolist() == [45, 54, 81, 90]
    for padding in (0, 1, 2):
        for placements in ([Shard(2), Shard(3)], [Shard(3), Shard(2)]):
            check_same_as_serial(
                lambda t, v, p=padding: F.conv2d(t, v, padding=p),
                [numbers(1, 1, 4, 4)],
                mesh,
                placements,
                plain=[numbers(2, 1, 3, 3, seed=1)],
            )


def test_E5_corners_of_a_two_dimensional_cut(run_mesh):
    run_mesh((2, 2), corners)


def widths_of_their_own(mesh) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 2, 3, padding=1), nn.Conv1d(2, 2, 5, padding=2), nn.Conv1d(2, 1, 1)
    ).double()
    check_same_as_serial(net, [numbers(1, 1, 12)], mesh, [Shard(2)])
    sent = []
    x = shard_tensor(numbers(1, 1, 12), mesh, [Shard(2)])
    with torch.no_grad():
        for layer in net:
            with shardfield.report() as report:
                x = layer(x)
            sent.append(report.bytes_sent)
    rank, last = mesh.get_local_rank(), mesh.size() - 1
    sides = (rank > 0) + (rank < last)
    assert sent == [8 * 1 * 1 * sides, 8 * 2 * 2 * sides, 0]


def test_E7_every_layer_has_its_own_width(run_mesh):
    for ranks in (1, 2, 4):
        run_mesh((ranks,), widths_of_their_own)


def domain_axis_only(mesh) -> None:
    data, domain = mesh.get_coordinate()
    samples = numbers(2, 1, 1, 8)
    w = numbers(1, 1, 3, seed=3)
    inner = mesh["domain"]
    own = shard_tensor(samples[data], inner, [Shard(2)])
    y = F.conv1d(own, w, padding=1)
    assert_equal(y, F.conv1d(samples[data], w, padding=1), "over the submesh")
    whole = shard_tensor(samples[:, 0], mesh, [Shard(0), Shard(2)])
    z = F.conv1d(whole, w, padding=1)
    assert is_sharded(z)
    assert_equal(z, F.conv1d(samples[:, 0], w, padding=1), "over the whole mesh")
    kept = shard_tensor(samples[0], mesh, [Replicate(), Shard(2)])
    assert (
        kept.to_local().flatten().tolist() == samples[0, 0, 0, 4 * domain : 4 * domain + 4].tolist()
    )
    assert_equal(
        F.conv1d(kept, w, padding=1), F.conv1d(samples[0], w, padding=1), "one axis holds it whole"
    )
    check_same_as_serial(
        lambda t, v: F.conv1d(t, v, padding=1),
        [samples[:, 0]],
        mesh,
        [Shard(0), Shard(2)],
        plain=[w],
    )
    check_same_as_serial(
        lambda t, v: F.conv1d(t, v, padding=1),
        [samples[0]],
        mesh,
        [Replicate(), Shard(2)],
        plain=[w],
    )


def on_named_mesh() -> None:
    from rank_pool import mesh_of

    domain_axis_only(mesh_of((2, 2), ("data", "domain")))


def test_E9_neighbours_are_those_of_the_domain_axis(run_ranks):
    run_ranks(4, on_named_mesh)
