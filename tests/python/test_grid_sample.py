"""Sampling at the points of a grid, image and points cut in every way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from many_cases import layouts_of
from oracle import Cut, check_same_as_serial, numbers, scatter, sharded
from torch.distributed.tensor import Replicate, Shard

import shardfield

GRID_2D = numbers(2, 4, 3, 2, seed=1).mul(0.6).tanh()
GRID_3D = numbers(1, 3, 4, 2, 3, seed=2).mul(0.6).tanh()


def images_cut(mesh) -> None:
    for mode in ("bilinear", "nearest", "bicubic"):
        for _, cut in layouts_of(mesh, (0, 1, 2, 3), numbers(2, 4, 5, 6)):
            check_same_as_serial(
                lambda x, g, mode=mode: F.grid_sample(x, g, mode=mode, align_corners=False),
                [cut],
                mesh,
                plain=[GRID_2D],
                second=False,
                no_fallback=mesh.ndim == 1,
            )
    for _, cut in layouts_of(mesh, (1, 2, 3, 4), numbers(1, 4, 4, 5, 3)):
        check_same_as_serial(
            lambda x, g: F.grid_sample(x, g, padding_mode="border", align_corners=True),
            [cut],
            mesh,
            plain=[GRID_3D],
            second=False,
            no_fallback=mesh.ndim == 1,
        )


def test_images_cut(run_mesh, mesh_shape):
    run_mesh(mesh_shape, images_cut, limit_s=180)


def points_cut(mesh) -> None:
    def sample(g, x):
        return F.grid_sample(x, g, align_corners=False)

    for _, cut in layouts_of(mesh, (0, 1, 2), GRID_2D):
        check_same_as_serial(
            sample, [cut], mesh, plain=[numbers(2, 3, 5, 6)], second=False, no_fallback=True
        )
    if mesh.ndim == 2:
        image = Cut(numbers(2, 4, 5, 6), [Shard(2), Replicate()])
        points = Cut(GRID_2D, [Replicate(), Shard(1)])
        check_same_as_serial(sample, [points, image], mesh, second=False)
        return
    for dim in (0, 1, 2, 3):
        both = [Cut(GRID_2D, [Shard(1)]), Cut(numbers(2, 4, 5, 6), [Shard(dim)])]
        check_same_as_serial(sample, both, mesh, second=False)


def test_points_cut(run_mesh, mesh_shape):
    run_mesh(mesh_shape, points_cut)


def warp(mesh) -> dict[str, int]:
    """Registration of volumes: an affine grid, one sample, as many channels as ranks."""
    theta = torch.eye(2, 3, dtype=torch.float64)[None] * 0.9
    image = Cut(numbers(1, 4, 8, 7), [Shard(2)])
    grid = F.affine_grid(theta, [1, 4, 8, 7], align_corners=False)
    with shardfield.report() as report:
        F.grid_sample(scatter(image, mesh), grid, align_corners=False)
    return dict(report.fallbacks)


def test_one_sample_is_not_gathered(run_mesh):
    assert run_mesh((4,), warp) == [{}] * 4


def near(points: tuple[int, ...], align_corners: bool, amount: float, samples: int = 1):
    """A grid near the identity, moved by up to some rows: what a registration samples."""
    ndim = len(points)
    theta = torch.eye(ndim, ndim + 1, dtype=torch.float64).expand(samples, -1, -1)
    grid = F.affine_grid(theta, [samples, 1, *points], align_corners=align_corners)
    return grid + numbers(*grid.shape, seed=5).tanh() * (2 * amount / min(points))


def sampler(**modes):
    return lambda x, g: F.grid_sample(x, g, **modes)


MODES_2D = [
    (mode, padding, align)
    for mode in ("bilinear", "nearest", "bicubic")
    for padding in ("zeros", "border", "reflection")
    for align in (False, True)
]


def windows_2d(mesh) -> None:
    """Every mode; the points of the border rows lie outside of the image."""
    image = numbers(1, 2, 24, 20)
    cuts = [Shard(2)] if mesh.ndim == 1 else [Shard(2), Shard(3)]
    points = [Shard(1)] if mesh.ndim == 1 else [Shard(1), Shard(2)]
    for mode, padding, align in MODES_2D:
        call = sampler(mode=mode, padding_mode=padding, align_corners=align)
        grid = near((24, 20), align, 1.3)
        try:
            check_same_as_serial(
                call, [Cut(image, cuts), Cut(grid, points)], mesh, second=False, output_sharded=True
            )
            check_same_as_serial(
                call, [Cut(image, cuts)], mesh, plain=[grid], second=False, output_sharded=True
            )
        except AssertionError as fault:
            raise AssertionError(f"{mode}, {padding}, align_corners={align}") from fault


def test_windows_of_images(run_mesh, mesh_shape):
    run_mesh(mesh_shape, windows_2d, limit_s=120)


def windows_3d(mesh) -> None:
    image = numbers(2, 1, 18, 6, 5)
    for align in (False, True):
        for padding in ("zeros", "border", "reflection"):
            call = sampler(padding_mode=padding, align_corners=align)
            grid = near((18, 6, 5), align, 0.8, samples=2)
            cuts = [Cut(image, [Shard(2)]), Cut(grid, [Shard(1)])]
            if mesh.ndim == 2:
                cuts = [Cut(image, [Shard(0), Shard(2)]), Cut(grid, [Shard(0), Shard(1)])]
            check_same_as_serial(call, cuts, mesh, second=False, output_sharded=True)


def test_windows_of_volumes(run_mesh, mesh_shape):
    run_mesh(mesh_shape, windows_3d, limit_s=120)


def on_rows(mesh) -> None:
    """Points exactly on rows, where derivatives jump; other sizes; uneven and empty pieces."""
    for align in (False, True):
        call = sampler(align_corners=align)
        for size, points in (((16, 8), (16, 8)), ((16, 8), (9, 5)), ((12, 8), (31, 8))):
            image, grid = numbers(1, 1, *size), near(points, align, 0.0)
            check_same_as_serial(
                call, [Cut(image, [Shard(2)]), Cut(grid, [Shard(1)])], mesh, second=False
            )
    ranks = mesh.size()
    rows = {0: [17] + [1] * (ranks - 1)}, {0: [0] * (ranks - 1) + [16 + ranks]}
    grid = near((16 + ranks, 6), False, 0.9)
    for sizes in rows:
        cuts = [
            Cut(numbers(1, 2, 16 + ranks, 6), [Shard(2)], sizes),
            Cut(grid, [Shard(1)], sizes),
        ]
        check_same_as_serial(sampler(align_corners=False), cuts, mesh, second=False)


def test_rows_pieces_and_sizes(run_mesh):
    for ranks in (2, 4):
        run_mesh((ranks,), on_rows)


def least_rows(mesh) -> tuple[int, int]:
    """Bytes of an advection step whose points lie within a row of their place."""
    image, grid = numbers(1, 1, 40, 10), near((40, 10), True, 0.5)
    x, g = sharded(image, mesh, 2), sharded(grid, mesh, 1)
    with shardfield.report() as report:
        F.grid_sample(x, g, align_corners=True)
    return report.bytes_sent, report.messages


def test_only_touched_rows_travel(run_mesh):
    # At most 3 rows of 80 bytes over each of 3 borders and either way, and the ranges themselves.
    sent = sum(sent for sent, _ in run_mesh((4,), least_rows))
    assert sent <= 3 * 2 * 3 * 80 + 4 * 3 * 16


def far(mesh) -> None:
    """Points anywhere: the image moves to the channels, or is gathered and counted."""
    grid = numbers(1, 12, 6, 2, seed=3).tanh()
    for channels in (1, 4):
        cuts = [Cut(numbers(1, channels, 12, 6), [Shard(2)]), Cut(grid, [Shard(1)])]
        check_same_as_serial(
            sampler(align_corners=False), cuts, mesh, second=False, no_fallback=channels > 1
        )


def test_far_points(run_mesh):
    run_mesh((3,), far)
