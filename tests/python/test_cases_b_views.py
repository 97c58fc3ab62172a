"""Published cases, kind B: views, reshapes, slices and the layout of the local piece."""

from __future__ import annotations

import itertools

import torch
from oracle import arange, assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from shardfield.domain_parallel import shard_tensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import shardfield


def view_of_a_cut_inner_dim(mesh) -> None:
    x = sharded(arange(12, 8), mesh, 1)
    y = x.view(16, 6)
    assert full(y)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert full(y)[1].tolist() == [6, 7, 8, 9, 10, 11]
    check_same_as_serial(
        lambda t: t.view(16, 6) * 2, [arange(12, 8)], mesh, [Shard(1)], no_fallback=False
    )


def chain_of_views(mesh) -> None:
    x = sharded(arange(4, 6), mesh, 0)
    assert full(x.view(2, 12).view(3, 8))[1].tolist() == list(range(8, 16))
    check_same_as_serial(
        lambda t: t.view(2, 12).view(3, 8) * 2, [arange(4, 6)], mesh, [Shard(0)], no_fallback=False
    )


def test_B1_view_that_moves_the_cut(run_mesh):
    run_mesh((4,), view_of_a_cut_inner_dim)
    run_mesh((2,), chain_of_views)


def in_place_views(mesh) -> None:
    x = sharded(arange(1, 6), mesh, 1)
    x.squeeze_(0)
    assert tuple(x.shape) == (6,) and tuple(x.to_local().shape) == (3,)
    x.unsqueeze_(1)
    assert tuple(x.shape) == (6, 1) and tuple(x.to_local().shape) == (3, 1)
    x.t_()
    assert tuple(x.shape) == (1, 6) and tuple(x.to_local().shape) == (1, 3)
    x.transpose_(0, 1)
    assert tuple(x.shape) == (6, 1) and tuple(x.to_local().shape) == (3, 1)
    assert full(x).flatten().tolist() == [0, 1, 2, 3, 4, 5]


def test_B5_in_place_views_change_label_and_data(run_mesh):
    run_mesh((2,), in_place_views)


def slice_stays_sharded(mesh) -> None:
    x = sharded(arange(1024, 16), mesh, 0)
    with shardfield.report() as report:
        y = x[100:900]
    assert is_sharded(y) and tuple(y.shape) == (800, 16)
    assert y.to_local().shape[0] == [156, 256, 256, 132][mesh.get_local_rank()]
    assert not report.fallbacks and report.bytes_sent == 0
    assert y.to_local().untyped_storage().data_ptr() == x.to_local().untyped_storage().data_ptr()
    assert_equal(y, arange(1024, 16)[100:900], "slice")
    check_same_as_serial(lambda t: t[100:900] * 2, [numbers(1024, 3)], mesh, [Shard(0)])


def test_B7_slice_of_the_cut_dim_stays_sharded(run_mesh):
    run_mesh((4,), slice_stays_sharded)


def narrow_values(mesh, length: int, sizes: list[int] | None, cases: list) -> None:
    x = sharded(arange(length), mesh, 0, sizes)
    for start, count in cases:
        want = list(range(start, start + count))
        assert full(x.narrow(0, start, count)).tolist() == want
        assert full(x[start : start + count]).tolist() == want
        first = torch.tensor(start)
        assert full(x.narrow(0, first, count)).tolist() == want


def test_B9_narrow_reads_the_right_rows_on_every_rank(run_mesh):
    run_mesh((2,), narrow_values, length=8, sizes=None, cases=[(1, 4)])
    run_mesh((4,), narrow_values, length=8, sizes=None, cases=[(5, 2), (7, 1)])
    run_mesh((3,), narrow_values, length=8, sizes=[3, 3, 2], cases=[(2, 5)])


def axis_orders(mesh) -> None:
    x = arange(8)
    layouts = [
        [Shard(0), Shard(0)],
        [_StridedShard(0, split_factor=2), Shard(0)],  # axis 1 cuts first
        [Shard(0), Replicate()],
        [Replicate(), Shard(0)],
    ]
    inner_first = shard_tensor(x, mesh, layouts[1])
    i, j = mesh.get_coordinate()
    assert inner_first.to_local().tolist() == [4.0 * j + 2.0 * i, 4.0 * j + 2.0 * i + 1]
    for a, b in itertools.permutations(range(4), 2):
        start = shard_tensor(x, mesh, layouts[a])
        there = start.redistribute(placements=layouts[b])
        assert_equal(there, x, f"{layouts[a]} to {layouts[b]}")
        back = there.redistribute(placements=layouts[a])
        assert back.to_local().tolist() == start.to_local().tolist()


def test_B13_order_of_two_axes_on_one_dim(run_mesh):
    run_mesh((2, 2), axis_orders)
