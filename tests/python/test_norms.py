"""Normalization: statistics over any cut, weighted by real counts; running statistics stay plain."""

from __future__ import annotations

import copy
import math
import random

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
    scatter,
)
from torch import nn
from torch.distributed.tensor import Shard

import shardfield

SHAPE = (2, 6, 7, 5)

NORMS = {
    "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    "batch_eval": lambda x, w, b: F.batch_norm(x, arange(6), arange(6) + 1, w, b, False),
    "group": lambda x, w, b: F.group_norm(x, 3, w, b),
    "group_of_one": lambda x, w, b: F.group_norm(x, 1, w, b),
    "instance": lambda x, w, b: F.instance_norm(x, None, None, w, b, True),
    "instance_running": lambda x, w, b: F.instance_norm(x, arange(6), arange(6) + 1, w, b, True),
    "layer_channels_last": lambda x, w, b: F.layer_norm(x.permute(0, 2, 3, 1), (6,), w, b),
    "rms_channels_last": lambda x, w, b: F.rms_norm(x.permute(0, 2, 3, 1), (6,), w) + b,
}


def channel_norms(mesh, dims: tuple[int, ...]) -> None:
    for name, norm in NORMS.items():
        try:
            check_same_as_serial(
                norm,
                [2 * numbers(*SHAPE) + 3],
                mesh,
                [Shard(d) for d in dims],
                plain=[numbers(6, seed=1), numbers(6, seed=2)],
                output_sharded=True,
            )
        except AssertionError as error:
            raise AssertionError(f"{name} cut on {dims}: {error}") from error


@pytest.mark.parametrize("dim", range(4))
def test_norms_on_every_dim(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, channel_norms, dims=(dim,) * len(mesh_shape))


@pytest.mark.parametrize("dims", [(0, 2), (2, 3), (3, 2), (1, 3), (0, 1)])
def test_norms_on_two_dims(run_mesh, dims):
    run_mesh((2, 2), channel_norms, dims=dims)


def whole_norms(mesh, dims: tuple[int, ...]) -> None:
    for shape in ((5,), (7, 5), (6, 7, 5)):
        weights = [numbers(*shape, seed=1), numbers(*shape, seed=2)]
        cut = [2 * numbers(*SHAPE) + 3], mesh, [Shard(d) for d in dims]
        check_same_as_serial(lambda x, w, b, s=shape: F.layer_norm(x, s, w, b), *cut, plain=weights)
        check_same_as_serial(lambda x, s=shape: F.layer_norm(x, s), *cut)
        check_same_as_serial(lambda x, w, s=shape: F.rms_norm(x, s, w), *cut, plain=weights[:1])
        check_same_as_serial(lambda x, s=shape: F.rms_norm(x, s, eps=0.1), *cut)


@pytest.mark.parametrize("dim", range(4))
def test_layer_and_rms_norm_over_cut_dims(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, whole_norms, dims=(dim,) * len(mesh_shape))


def uneven(mesh, sizes: list[int]) -> None:
    for dim in (0, 2):
        x = numbers(*SHAPE[:dim], sum(sizes), *SHAPE[dim + 1 :]) * 3 - 1
        for norm in NORMS.values():
            check_same_as_serial(
                norm,
                [Cut(x, [Shard(dim)], {0: sizes})],
                mesh,
                plain=[numbers(6, seed=1), numbers(6, seed=2)],
            )


@pytest.mark.parametrize("sizes", [[5, 0, 2], [0, 0, 4], [1, 6, 0]])
def test_norms_with_uneven_and_empty_pieces(run_mesh, sizes):
    run_mesh((3,), uneven, sizes=sizes)


def running_statistics(mesh, momentum: float | None, dim: int) -> None:
    norms = [
        nn.BatchNorm2d(6, momentum=momentum),
        nn.BatchNorm2d(6, momentum=momentum, affine=False),
        nn.InstanceNorm2d(6, momentum=momentum or 0.1, affine=True, track_running_stats=True),
    ]
    for ours in norms:
        ours = ours.double()
        serial = copy.deepcopy(ours)
        for step in range(3):
            x = numbers(*SHAPE, seed=step) * (step + 1) + step
            cut = scatter(Cut(x, [Shard(dim)] * mesh.ndim), mesh)
            with shardfield.report() as report:
                y = ours(cut)
            assert not report.fallbacks
            assert_equal(y.detach(), serial(x).detach(), "training output")
        for (name, got), want in zip(ours.named_buffers(), serial.buffers(), strict=True):
            assert not is_sharded(got), name
            assert_equal(got, want, name)
        ours.eval(), serial.eval()
        with shardfield.report() as report, torch.inference_mode():
            y = ours(cut)
        assert report.bytes_sent == 0 and not report.fallbacks, "evaluation sends nothing"
        with torch.no_grad():
            assert_equal(y.clone(), serial(x), "evaluation output")


@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dim", [0, 2, 3])
def test_running_statistics(run_mesh, mesh_shape, momentum, dim):
    run_mesh(mesh_shape, running_statistics, momentum=momentum, dim=dim)


def variance_of_uneven_pieces(mesh, sizes: list[int]) -> None:
    norm = nn.BatchNorm1d(1, momentum=0.1).double()
    x = scatter(Cut(arange(5, 1), [Shard(0)], {0: sizes}), mesh).requires_grad_()
    norm(x).square().sum().backward()
    assert norm.running_mean.tolist() == pytest.approx([0.2])
    assert norm.running_var.tolist() == pytest.approx([1.15])
    check_same_as_serial(
        nn.BatchNorm1d(1).double(), [Cut(arange(5, 1), [Shard(0)], {0: sizes})], mesh
    )


@pytest.mark.parametrize("sizes", [[3, 2], [4, 1], [3, 2, 0], [0, 5]])
def test_C11_variance_is_weighted_by_real_counts(run_mesh, sizes):
    run_mesh((len(sizes),), variance_of_uneven_pieces, sizes=sizes)


def far_from_zero(mesh) -> None:
    """Chan's combination keeps what sums of squares lose."""
    x = numbers(2, 4, 8) + 1e7
    for norm in (
        lambda t: F.batch_norm(t, None, None, training=True),
        lambda t: F.group_norm(t, 2),
        lambda t: F.layer_norm(t, (8,)),
    ):
        check_same_as_serial(norm, [x], mesh, [Shard(2)], second=False, rtol=1e-6, atol=1e-6)


def test_statistics_far_from_zero(run_mesh):
    run_mesh((3,), far_from_zero)


def messages(mesh) -> list[int]:
    """Messages sent by a batch, a group and a layer norm, forward then backward."""
    counts = []
    for norm in (nn.BatchNorm2d(6), nn.GroupNorm(3, 6), nn.LayerNorm(5)):
        x = scatter(Cut(numbers(*SHAPE).float(), [Shard(2)]), mesh).requires_grad_()
        with shardfield.report() as forward:
            y = norm(x).square()
        with shardfield.report() as backward:
            y.backward(y.detach())
        counts += [forward.messages, backward.messages]
    return counts


def test_one_message_each_way(run_mesh):
    assert run_mesh((2,), messages)[0] == [1, 1, 1, 1, 0, 1]


def forward_bytes(mesh) -> int:
    """Bytes this rank sends for the statistics of 6 channels in float64."""
    norm = nn.BatchNorm2d(6).double()
    x = scatter(Cut(numbers(*SHAPE), [Shard(2 + axis) for axis in range(mesh.ndim)]), mesh)
    with shardfield.report() as report:
        norm(x)
    return report.bytes_sent


def test_statistics_send_what_an_all_reduce_would(run_mesh, mesh_shape):
    sent = sum(run_mesh(mesh_shape, forward_bytes))
    ranks = math.prod(mesh_shape)
    assert sent == 2 * (ranks - 1) * 2 * 6 * 8


def half_types(mesh, dtype: torch.dtype) -> None:
    x = numbers(*SHAPE).to(dtype)
    for name, norm in NORMS.items():
        w, b = (numbers(6, seed=s).to(dtype) for s in (1, 2))
        if "eval" in name or "running" in name:
            continue
        cut = scatter(Cut(x, [Shard(2)]), mesh)
        got, want = norm(cut, w, b), norm(x.float(), w.float(), b.float())
        assert got.dtype == dtype
        torch.testing.assert_close(full(got).float(), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_types_accumulate_in_float(run_mesh, dtype):
    run_mesh((2,), half_types, dtype=dtype)


def drawn_norms(mesh, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        spatial = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
        groups = rng.randint(1, 3)
        channels = groups * rng.randint(1, 3)
        shape = [rng.randint(1, 3), channels, *spatial]
        dims = [rng.choice([d for d in range(len(shape)) if d != 1]) for _ in range(mesh.ndim)]
        name = rng.choice(["batch", "group", "instance", "layer", "rms"])
        count = torch.Size(spatial).numel()
        if (name == "batch" and shape[0] * count == 1) or (name == "instance" and count == 1):
            continue
        function = {
            "batch": lambda x, w: F.batch_norm(x, None, None, w, None, True, 0.1, 0.3),
            "group": lambda x, w, g=groups: F.group_norm(x, g, w, None, 0.3),
            "instance": lambda x, w: F.instance_norm(x, None, None, w, None, True, 0.1, 0.3),
            "layer": lambda x, w, s=shape: F.layer_norm(
                x * w.view(-1, *[1] * (len(s) - 2)), s[2:], eps=0.3
            ),
            "rms": lambda x, w, s=shape: F.rms_norm(
                x * w.view(-1, *[1] * (len(s) - 2)), s[2:], eps=0.3
            ),
        }[name]
        try:
            check_same_as_serial(
                function,
                [numbers(*shape, seed=seed)],
                mesh,
                [Shard(d) for d in dims],
                plain=[numbers(channels, seed=1)],
            )
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {name} of {shape} cut on {dims}: {error}"
            ) from error


@pytest.mark.parametrize("seed", range(4))
def test_drawn_norms(run_mesh, mesh_shape, seed):
    print("seed", seed)
    run_mesh(mesh_shape, drawn_norms, seed=seed)
