"""Sampling at the points of a grid, image and points cut in every way."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from many_cases import layouts_of
from oracle import Cut, check_same_as_serial, numbers, scatter
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
