"""Published cases, kind B: views, reshapes, slices and the layout of the local piece."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracle import arange, assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from shardfield.domain_parallel import shard_tensor
from torch import nn
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


def linear_on_a_cut_sequence(mesh) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(8, 4).double()
    (out,) = check_same_as_serial(layer, [numbers(2, 10, 8)], mesh, [Shard(1)])
    assert is_sharded(out) and out.placements == (Shard(1),)
    check_same_as_serial(
        lambda t, w: t.reshape(-1, 8) @ w.t(),
        [numbers(2, 10, 8)],
        mesh,
        [Shard(1)],
        plain=[numbers(4, 8, seed=1)],
    )


def test_B3_linear_on_a_cut_sequence(run_mesh):
    run_mesh((4,), linear_on_a_cut_sequence)


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


def flip_values(mesh) -> None:
    x = sharded(arange(5), mesh, 0, [3, 2])
    assert full(x.flip(0)).tolist() == [4, 3, 2, 1, 0]
    y = sharded(arange(4, 3), mesh, 0)
    with shardfield.report() as report:
        z = y.flip(1)
    assert report.bytes_sent == 0 and not report.fallbacks
    assert_equal(z, arange(4, 3).flip(1), "flip of a whole dim")
    check_same_as_serial(
        lambda t: t.flip(0, 1), [numbers(5, 3)], mesh, [Shard(0)], sizes={0: [3, 2]}
    )


def test_B11_flip(run_mesh):
    run_mesh((2,), flip_values)


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


def stack_gradients(mesh) -> None:
    parts = [sharded(arange(2, 4), mesh, 1).requires_grad_() for _ in range(2)]
    out = torch.stack(parts, 0)
    (out * arange(2, 2, 4)).sum().backward()
    for i, p in enumerate(parts):
        assert is_sharded(p.grad)
        assert_equal(p.grad, arange(2, 2, 4)[i], f"gradient {i}")
    check_same_as_serial(
        lambda a, b: torch.stack([a, b], 0), [arange(2, 4), arange(2, 4)], mesh, [Shard(1)]
    )


def test_B15_gradient_of_stack(run_mesh):
    run_mesh((2,), stack_gradients)


VIEWS = {
    "permute": lambda x: x.permute(2, 0, 1) * 2,
    "transpose": lambda x: x.transpose(1, 2) * 2,
    "unsqueeze": lambda x: x[:, None] * 2,
    "select_whole": lambda x: x[1] * 2,
    "select_cut": lambda x: x[:, 4] * 2,
    "expand": lambda x: x[None].expand(3, -1, -1, -1) * 2,
    "flatten_right": lambda x: x.flatten(1) * 2,
    "flatten_left": lambda x: x.flatten(0, 1) * 2,
    "unflatten": lambda x: x.unflatten(2, (2, 2)) * 2,
    "split": lambda x: x.split(2, 2),
    "split_cut": lambda x: x.split(4, 1),
    "chunk_cut": lambda x: x.chunk(3, 1),
    "unbind": lambda x: x.unbind(0),
    "cat_whole": lambda x: torch.cat([x, x * 2], 0),
    "cat_cut": lambda x: torch.cat([x, x * 2], 1),
    "roll": lambda x: x.roll((2, -3), (2, 1)),
    "step": lambda x: x[:, 1:9:3] * 2,
    "ellipsis": lambda x: x[..., 1] * 2,
    "repeat": lambda x: x.repeat(2, 1, 1),
    "contiguous": lambda x: x.transpose(0, 2).contiguous() * 2,
    "diagonal": lambda x: x.diagonal(0, 0, 2) * 2,
    "movedim": lambda x: x.movedim(1, -1) * 2,
    "squeeze": lambda x: x[:, :, :1].squeeze(2) * 2,
    "unfold_whole": lambda x: x.unfold(2, 2, 1) * 2,
    "pixel_shuffle": lambda x: F.pixel_shuffle(x.permute(2, 1, 0), 2) * 2,
}


def view_op(mesh, name: str, sizes: list[int] | None) -> None:
    check_same_as_serial(
        VIEWS[name],
        [numbers(2, 10, 4)],
        mesh,
        [Shard(1)],
        sizes={0: sizes} if sizes else None,
        no_fallback=name not in ("diagonal", "unfold_whole"),  # their gradients are gathered
    )


@pytest.mark.parametrize("name", VIEWS)
def test_views_even_uneven_and_empty(run_mesh, name):
    run_mesh((2,), view_op, name=name, sizes=None)
    run_mesh((3,), view_op, name=name, sizes=[5, 0, 5])
    run_mesh((4,), view_op, name=name, sizes=None)


INFERENCE_VIEWS = {
    "select": lambda t: t.select(2, 1),
    "select of the last row": lambda t: t.select(2, 7),
    "squeeze": lambda t: t[:, :, 7:8].squeeze(2),
    "expand": lambda t: t[:, :, 0:1].expand(2, 3, 4, 6),
    "slice of merged dims": lambda t: t.transpose(2, 3).flatten(2)[:, :, 3:20],
    "view that moves borders": lambda t: t.flatten(1).view(2, 9, 16),
    "diagonal": lambda t: t.diagonal(0, 2, 3),
    "unfold": lambda t: t.unfold(2, 3, 1),
    "unbind": lambda t: t.unbind(2)[5],
    "chunk": lambda t: t.chunk(3, 2)[1],
    "conjugate": lambda t: torch.complex(t, t).conj().imag,
}


def inference_views(mesh) -> None:
    """Of tensors made outside of inference_mode, which their views then share a version with."""
    x = numbers(2, 3, 8, 6)
    before = sharded(x, mesh, 2)
    with torch.inference_mode():
        inside = sharded(x.clone(), mesh, 2)
        for name, view in INFERENCE_VIEWS.items():
            for s in (before, inside):
                assert_equal(full(view(s)), view(x), name)


def test_views_in_inference_mode(run_mesh, mesh_shape):
    run_mesh(mesh_shape, inference_views)
