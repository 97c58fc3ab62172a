"""fold and unfold of images: blocks that reach over the borders of the pieces."""

from __future__ import annotations

import pytest
import torch.nn.functional as F
from cuts import cuts_of
from oracle import Cut, check_same_as_serial, numbers
from torch.distributed.tensor import Shard

UNFOLDS = {
    "blocks": {"kernel_size": 2, "stride": 2},
    "overlapping": {"kernel_size": (3, 2), "padding": (1, 0), "stride": (2, 1)},
    "dilated": {"kernel_size": 3, "dilation": 2, "padding": 2},
}
FOLDS = {
    "blocks": (2 * 4, {"output_size": (8, 6), "kernel_size": 2, "stride": 2}),
    "overlapping": (2 * 9, {"output_size": (8, 5), "kernel_size": 3, "padding": 1, "stride": 2}),
    "dilated": (1 * 4, {"output_size": (7, 6), "kernel_size": 2, "dilation": 3}),
}


def unfolds(mesh) -> None:
    x = numbers(2, 3, 9, 8)
    for name, options in UNFOLDS.items():
        for cut in cuts_of(mesh, x, (2, 3)):
            try:
                check_same_as_serial(lambda t, o=options: F.unfold(t, **o), [cut], mesh)
            except AssertionError as error:
                raise AssertionError(f"{name} {cut.placements} {cut.sizes}: {error}") from error
    for dim in (0, 1):
        check_same_as_serial(
            lambda t: F.unfold(t, 3, padding=1), [Cut(x, [Shard(dim)] * mesh.ndim)], mesh
        )
    check_same_as_serial(
        lambda t: F.unfold(t, 3, padding=1), [Cut(x[0], [Shard(1)] * mesh.ndim)], mesh
    )


def test_unfold(run_mesh, mesh_shape):
    run_mesh(mesh_shape, unfolds)


def _positions(options) -> int:
    import torch

    image = torch.empty(1, 1, *options["output_size"], device="meta")
    rest = {k: v for k, v in options.items() if k != "output_size"}
    return F.unfold(image, **rest).shape[-1]


def folds(mesh, dim: int) -> None:
    for name, (rows, options) in FOLDS.items():
        x = numbers(4, rows, _positions(options))
        try:
            check_same_as_serial(
                lambda t, o=options: F.fold(t, **o), [Cut(x, [Shard(dim)] * mesh.ndim)], mesh
            )
        except AssertionError as error:
            raise AssertionError(f"{name} cut on {dim}: {error}") from error


@pytest.mark.parametrize("dim", range(3))
def test_fold(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, folds, dim=dim)


def there_and_back(mesh) -> None:
    """An image keeps its cut along the rows, so that it meets the tensor it came from."""

    def both(x):
        y = F.fold(F.unfold(x, 3, padding=1), x.shape[2:], 3, padding=1)
        return y + x

    for dim in (2, 3):
        check_same_as_serial(
            both, [Cut(numbers(4, 2, 8, 6), [Shard(dim)] * mesh.ndim)], mesh, output_sharded=True
        )


def test_there_and_back(run_mesh, mesh_shape):
    run_mesh(mesh_shape, there_and_back)
