"""Interpolation of every mode, up and down, and the pixel and channel shuffles."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cuts import cuts_of
from oracle import Cut, arange, assert_equal, check_same_as_serial, full, numbers, sharded
from torch.distributed.tensor import Shard

import shardfield

SMOOTH = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}
SHAPES = {1: (11,), 2: (9, 6), 3: (4, 7, 5)}


def every_option(nd: int) -> list[dict]:
    options: list[dict] = []
    sizes = [
        tuple(2 * n for n in SHAPES[nd]),
        tuple(range(3, 3 + nd)),
        tuple([13] * nd),
        SHAPES[nd],
    ]
    for mode in ["nearest", "nearest-exact", "area", *SMOOTH[nd]]:
        corners = [False, True] if mode in SMOOTH[nd] else [None]
        for c in corners:
            more = {} if c is None else {"align_corners": c}
            options += [{"size": size, "mode": mode, **more} for size in sizes]
            options += [{"scale_factor": f, "mode": mode, **more} for f in (0.5, 2, 1.7)]
            if mode != "area":
                options.append(
                    {"scale_factor": 1.3, "recompute_scale_factor": True, "mode": mode, **more}
                )
        if mode in ("bilinear", "bicubic"):
            options += [{"size": (4, 9), "mode": mode, "antialias": True}]
            options += [{"scale_factor": 0.4, "mode": mode, "antialias": True}]
    return options


def modes(mesh, nd: int) -> None:
    x = numbers(1, 2, *SHAPES[nd], seed=nd)
    # Every option on some meshes: each mesh takes its share of them.
    share = {(1,): (0, 4), (2,): (0, 2), (3,): (1, 2), (4,): (2, 4), (2, 2): (1, 3)}
    start, step = share[tuple(mesh.shape)]
    for options in every_option(nd)[start::step]:
        for cut in cuts_of(mesh, x, range(2, 2 + nd)):
            try:
                check_same_as_serial(
                    lambda t, o=options: F.interpolate(t, **o), [cut], mesh, output_sharded=None
                )
            except AssertionError as error:
                raise AssertionError(f"{options} {cut.placements} {cut.sizes}: {error}") from error


@pytest.mark.parametrize("nd", [1, 2, 3])
def test_interpolate(run_mesh, mesh_shape, nd):
    run_mesh(mesh_shape, modes, nd=nd, limit_s=180)


def peers_faults(mesh) -> None:
    x = numbers(1, 2, 8, 10)
    for options in [
        {"size": (16, 20), "mode": "bilinear", "align_corners": True},
        {"scale_factor": 2, "mode": "bilinear", "align_corners": True},
        {"scale_factor": 0.5, "mode": "nearest"},
        {"size": (5, 7), "mode": "nearest"},
        {"size": (5, 7), "mode": "bilinear"},
    ]:
        for dim in (2, 3):
            check_same_as_serial(
                lambda t, o=options: F.interpolate(t, **o),
                [x],
                mesh,
                [Shard(dim)],
                output_sharded=True,
            )


def test_P3_align_corners_and_half_size(run_mesh, ranks):
    run_mesh((ranks,), peers_faults)


def one_row_of_nan(mesh) -> None:
    x = numbers(1, 2, 8, 6)
    x[0, 0, 3, 2] = float("nan")
    for options in [
        {"size": (8, 12), "mode": "bilinear"},
        {"size": (16, 6), "mode": "bilinear"},
        {"size": (16, 12), "mode": "bilinear"},
        {"size": (5, 9), "mode": "nearest"},
    ]:
        # Along a dim that keeps its size PyTorch's CPU kernel makes NaN of an infinity (0 * inf).
        if options["size"][0] != 8 and options["size"][1] != 6:
            x[0, 1, 6, 4] = float("inf")
        for dim in (2, 3):
            y = F.interpolate(sharded(x, mesh, dim), **options)
            assert_equal(y, F.interpolate(x, **options), f"{options} cut on {dim}")


def test_nan_spreads_as_on_one_device(run_mesh):
    run_mesh((2,), one_row_of_nan)


def up_from_four(mesh) -> None:
    x = sharded(arange(1, 1, 4), mesh, 2)
    up = F.interpolate(x, scale_factor=2, mode="linear")
    assert full(up).flatten().tolist() == [0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]
    up = F.interpolate(x, size=6, mode="linear", align_corners=True)
    assert full(up).flatten().tolist() == pytest.approx([0, 0.6, 1.2, 1.8, 2.4, 3])


def test_D9_linear_from_four(run_mesh, ranks):
    run_mesh((ranks,), up_from_four)


def whole_number_coordinates(mesh) -> None:
    """Where ATen's forward and backward kernels disagree about the nearest row."""
    for n, m in [(49, 21), (21, 49), (27, 63), (41, 82), (36, 100)]:
        for mode in ("nearest", "nearest-exact"):
            check_same_as_serial(
                lambda t, m=m, mode=mode: F.interpolate(t, size=m, mode=mode),
                [numbers(1, 3, n)],
                mesh,
                [Shard(2)],
            )


def test_nearest_rows_and_gradients_of_whole_number_coordinates(run_mesh):
    run_mesh((3,), whole_number_coordinates)


def narrow_dtypes(mesh) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = numbers(1, 3, 9, 8).to(dtype)
        for options in [
            {"mode": "bilinear", "size": (17, 15)},
            {"mode": "bilinear", "size": (5, 19), "align_corners": True},
            {"mode": "bicubic", "scale_factor": 1.5},
            {"mode": "bilinear", "size": (4, 3), "antialias": True},
            {"mode": "nearest", "size": (13, 5)},
        ]:
            if dtype == torch.bfloat16 and options.get("antialias"):
                continue  # PyTorch has no such kernel on the CPU
            y, y0 = F.interpolate(sharded(x, mesh, 2), **options), F.interpolate(x, **options)
            assert y.dtype == dtype
            assert_equal(
                full(y).double(),
                y0.double(),
                str(options),
                16 * torch.finfo(dtype).eps,
                16 * torch.finfo(dtype).eps,
            )


def test_narrow_dtypes(run_mesh):
    run_mesh((3,), narrow_dtypes)


def bytes_sent(mesh) -> None:
    x = sharded(numbers(1, 1, 8), mesh, 2)
    for options, rows in [
        ({"scale_factor": 2, "mode": "nearest"}, 0),
        ({"scale_factor": 2, "mode": "linear"}, 2),
        ({"scale_factor": 0.5, "mode": "nearest"}, 0),
    ]:
        with shardfield.report() as report:
            F.interpolate(x, **options)
        total = torch.tensor(float(report.bytes_sent))
        torch.distributed.all_reduce(total)
        assert total.item() == 8 * rows, options


def test_only_needed_rows_travel(run_mesh):
    run_mesh((2,), bytes_sent)


def bad_arguments(mesh) -> None:
    x = sharded(numbers(1, 1, 8, 8), mesh, 2)
    with pytest.raises(RuntimeError, match="should be greater than 0"):
        F.interpolate(x, size=(0, 3))


def test_bad_arguments_are_named(run_mesh):
    run_mesh((2,), bad_arguments)


def shuffles(mesh) -> None:
    x = numbers(2, 8, 6, 4)
    for dim in range(4):
        placements = [Shard(dim)] if mesh.ndim == 1 else [Shard(dim), Shard(2 if dim == 3 else 3)]
        for f in (
            lambda t: F.pixel_shuffle(t, 2),
            lambda t: F.pixel_unshuffle(t, 2),
            lambda t: F.channel_shuffle(t, 4),
        ):
            check_same_as_serial(f, [x], mesh, placements, output_sharded=True)
    n = mesh.size(0)
    uneven = [1, 5] + [0] * (n - 2) if n > 1 else [6]
    check_same_as_serial(
        lambda t: F.pixel_unshuffle(t, 2),
        [Cut(x, [Shard(2)] + [Shard(3)] * (mesh.ndim - 1), {0: uneven})],
        mesh,
    )


def test_pixel_and_channel_shuffles(run_mesh, mesh_shape):
    run_mesh(mesh_shape, shuffles)


def joined_bytes(mesh) -> tuple[int, int]:
    """Down and up again: the result is cut as the skip connection is, so cat moves nothing."""
    x = sharded(numbers(1, 2, 15, 4), mesh, 2)
    down = F.conv2d(x, numbers(3, 2, 3, 3, seed=1), stride=2, padding=1)
    for up in (
        F.interpolate(down, size=(15, 4), mode="bilinear"),
        F.interpolate(F.max_pool2d(x, 2, ceil_mode=True), size=(15, 4), mode="nearest"),
    ):
        with shardfield.report() as report:
            joined = torch.cat([x, up], 1)
        assert joined.to_local().shape[2] == x.to_local().shape[2]
        assert report.bytes_sent == 0
    return x.to_local().shape[2], up.to_local().shape[2]


def test_up_again_is_cut_as_the_skip(run_mesh):
    for ranks in (2, 3, 4):
        for fine, up in run_mesh((ranks,), joined_bytes):
            assert fine == up
