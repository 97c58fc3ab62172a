"""Published cases, kind D: the geometry of convolution, pooling, padding and resampling."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F
from oracle import (
    Cut,
    arange,
    assert_equal,
    check_same_as_serial,
    full,
    is_sharded,
    numbers,
    sharded,
)
from shardfield.domain_parallel import shard_tensor
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardfield


def ones_kernel(k: int) -> torch.Tensor:
    return torch.ones(1, 1, k, dtype=torch.float64)


def line(mesh, length: int, sizes: list[int] | None = None) -> torch.Tensor:
    return sharded(arange(1, 1, length), mesh, 2, sizes)


def conv_on_either_side(mesh, dim: int, k: int, s: int, p: int) -> None:
    check_same_as_serial(
        lambda x, w: F.conv2d(x, w, stride=s, padding=p),
        [numbers(1, 1, 8, 8)],
        mesh,
        [Shard(dim)],
        plain=[numbers(1, 1, k, k, seed=1)],
        output_sharded=True,
    )


@pytest.mark.parametrize("dim", [2, 3])
@pytest.mark.parametrize(
    ("k", "s", "p"), [(3, 1, 1), (1, 1, 0), (4, 4, 0), (2, 2, 0), (3, 2, 1), (5, 1, 2)]
)
def test_D1_convolution_along_either_dim(run_mesh, dim, k, s, p):
    run_mesh((2,), conv_on_either_side, dim=dim, k=k, s=s, p=p)


def depthwise_cut_on_channels(mesh) -> None:
    w = torch.ones(4, 1, 3, 3, dtype=torch.float64)
    x = numbers(1, 4, 5, 5)
    y = F.conv2d(sharded(x, mesh, 1), w, padding=1, groups=4)
    assert_equal(y, F.conv2d(x, w, padding=1, groups=4), "output")
    assert is_sharded(y) and y.placements == (Shard(1),)
    assert tuple(y.to_local().shape) == (1, 2, 5, 5)
    check_same_as_serial(
        lambda t, v: F.conv2d(t, v, padding=1, groups=4), [x], mesh, [Shard(1)], plain=[w]
    )


def test_D17_depthwise_convolution_cut_on_channels(run_mesh):
    run_mesh((2,), depthwise_cut_on_channels)


def even_kernels(mesh) -> None:
    x, w = line(mesh, 8).requires_grad_(), ones_kernel(4).requires_grad_()
    y = F.conv1d(x, w)
    assert full(y).flatten().tolist() == [6, 10, 14, 18, 22]
    assert y.to_local().shape[-1] in (2, 3)
    y.sum().backward()
    assert full(x.grad).flatten().tolist() == [1, 2, 3, 4, 4, 3, 2, 1]
    assert w.grad.flatten().tolist() == [10, 15, 20, 25]
    z = F.conv1d(line(mesh, 8), ones_kernel(4), stride=2, padding=1)
    assert full(z).flatten().tolist() == [3, 10, 18, 18]


def test_D3_even_kernels(run_mesh):
    run_mesh((2,), even_kernels)


def one_rank(mesh) -> None:
    for cut_axis in range(mesh.ndim):
        placements = [Replicate()] * mesh.ndim
        placements[cut_axis] = Shard(2)
        x = shard_tensor(arange(1, 1, 8), mesh, placements).requires_grad_()
        w = ones_kernel(3).requires_grad_()
        F.conv1d(x, w, padding=1).sum().backward()
        assert full(x.grad).flatten().tolist() == [2, 3, 3, 3, 3, 3, 3, 2]
        assert w.grad.flatten().tolist() == [21, 28, 28]


def test_D5_one_rank_and_a_mesh_axis_of_size_one(run_mesh):
    run_mesh((1,), one_rank)
    run_mesh((2, 1), one_rank)
    run_mesh((1, 2), one_rank)


def halo_wider_than_the_piece(mesh, length: int, sizes: list[int]) -> None:
    y = F.conv1d(line(mesh, length, sizes), ones_kernel(7), padding=3)
    assert full(y).flatten().tolist() == [6, 10, 15, 15, 15, 14]
    check_same_as_serial(
        lambda x, w: F.conv1d(x, w, padding=3),
        [Cut(arange(1, 1, length), [Shard(2)], {0: sizes})],
        mesh,
        plain=[ones_kernel(7)],
    )


def test_D7_halo_wider_than_the_neighbours_piece(run_mesh):
    run_mesh((3,), halo_wider_than_the_piece, length=6, sizes=[2, 2, 2])
    run_mesh((3,), halo_wider_than_the_piece, length=6, sizes=[3, 0, 3])
    run_mesh((4,), halo_wider_than_the_piece, length=6, sizes=[1, 1, 3, 1])


def six_single_rows(mesh) -> None:
    halo_wider_than_the_piece(mesh, 6, [1] * 6)


def test_D7_six_ranks_of_one_row(run_mesh):
    run_mesh((6,), six_single_rows)


def pools_of_ten(mesh) -> None:
    x = line(mesh, 10)
    assert full(F.max_pool1d(x, 3, 2, 1)).flatten().tolist() == [1, 3, 5, 7, 9]
    mean = F.avg_pool1d(x, 3, 2, 1, count_include_pad=False)
    assert full(mean).flatten().tolist() == [0.5, 2, 4, 6, 8]


def up_from_four(mesh) -> None:
    x = line(mesh, 4)
    up = F.conv_transpose1d(x, ones_kernel(4), stride=2, padding=1)
    assert full(up).flatten().tolist() == [0, 1, 1, 3, 3, 5, 5, 3]
    up = F.conv_transpose1d(x, ones_kernel(3), stride=2, padding=1, output_padding=1)
    assert full(up).flatten().tolist() == [0, 1, 1, 3, 2, 5, 3, 3]
    up = F.interpolate(x, scale_factor=2, mode="linear")
    assert full(up).flatten().tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    up = F.interpolate(x, size=6, mode="linear", align_corners=True)
    assert full(up).flatten().tolist() == pytest.approx([0, 0.6, 1.2, 1.8, 2.4, 3])


def test_D9_pooling_transposed_convolution_and_interpolation(run_mesh):
    run_mesh((3,), pools_of_ten)
    run_mesh((2,), up_from_four)


def input_without_gradient(mesh) -> None:
    x, w = line(mesh, 8), ones_kernel(3).requires_grad_()
    loss = F.conv1d(x, w, padding=1).sum()
    with shardfield.report() as report:
        loss.backward()
    assert w.grad.flatten().tolist() == [21, 28, 28]
    assert report.bytes_sent <= 64, "only the weight's gradient may travel"


def test_D11_input_without_gradient(run_mesh):
    run_mesh((2,), input_without_gradient)


def stride_phase(mesh) -> None:
    for first in range(11):
        y = F.conv1d(line(mesh, 10, [first, 10 - first]), ones_kernel(7), stride=2, padding=3)
        assert full(y).flatten().tolist() == [6, 15, 28, 42, 35], f"cut {first}/{10 - first}"
        check_same_as_serial(
            lambda x, w: F.conv1d(x, w, stride=2, padding=3),
            [Cut(arange(1, 1, 10), [Shard(2)], {0: [first, 10 - first]})],
            mesh,
            plain=[ones_kernel(7)],
        )


def test_D13_stride_phase_for_every_cut_of_ten(run_mesh):
    run_mesh((2,), stride_phase)


def causal_convolution(mesh) -> None:
    for _ in range(5):  # poison what a fresh buffer may reuse
        torch.full((4096,), float("nan"), dtype=torch.float64)
        x = F.pad(line(mesh, 4) + 1, (2, 0))
        y = F.conv1d(x, ones_kernel(3))
        assert full(y).flatten().tolist() == [1, 3, 6, 9]


def test_D15_causal_convolution_reads_no_unfilled_memory(run_mesh):
    run_mesh((4,), causal_convolution)


def padding_modes(mesh, mode: str, sizes: list[int] | None) -> None:
    for pad in [(1, 2), (3, 0), (0, 2)]:
        check_same_as_serial(
            lambda x, pad=pad: F.pad(x, pad, mode=mode),
            [Cut(numbers(1, 2, 8), [Shard(2)], {0: sizes} if sizes else {})],
            mesh,
        )
    if mode != "constant":
        torch.manual_seed(0)
        layer = nn.Conv1d(2, 3, 5, padding=2, padding_mode=mode).double()
        check_same_as_serial(
            layer, [Cut(numbers(1, 2, 8), [Shard(2)], {0: sizes} if sizes else {})], mesh
        )


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding_modes(run_mesh, mode):
    run_mesh((2,), padding_modes, mode=mode, sizes=None)
    run_mesh((3,), padding_modes, mode=mode, sizes=[4, 0, 4])
    run_mesh((4,), padding_modes, mode=mode, sizes=[1, 1, 5, 1])


def several_cuts_of_a_pool(mesh, length: int) -> None:
    n = mesh.size()
    cuts = [c for c in itertools.product(range(length + 1), repeat=n) if sum(c) == length][::7]
    for sizes in cuts:
        check_same_as_serial(
            lambda x: F.max_pool1d(x, 3, 2, 1, ceil_mode=True),
            [Cut(numbers(1, 1, length), [Shard(2)], {0: list(sizes)})],
            mesh,
        )


def test_overlapping_pool_on_many_cuts(run_mesh):
    run_mesh((3,), several_cuts_of_a_pool, length=9)
