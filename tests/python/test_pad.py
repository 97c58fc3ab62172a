"""Padding: every mode and sign, on cut and uncut dims."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cuts import cuts_of
from oracle import arange, check_same_as_serial, full, is_sharded, numbers, sharded
from torch.distributed.tensor import Shard

import shardfield

MODES = ["constant", "reflect", "replicate", "circular"]
WIDTHS = {
    1: [(1, 2), (3, 0), (0, 2), (-1, 2), (0, 0)],
    2: [(1, 2, 2, 1), (0, 0, 3, 2), (2, 1, 0, 0), (-1, 1, 2, -1)],
    3: [(1, 0, 2, 1, 1, 2), (0, 0, 0, 0, 2, -1)],
}


def paddings(mesh, mode: str) -> None:
    for nd, shape in [(1, (7,)), (2, (6, 5)), (3, (4, 5, 4))]:
        x = numbers(2, 2, *shape, seed=nd)
        for widths in WIDTHS[nd]:
            if mode == "circular" and min(widths) < 0 and nd == 3:
                continue
            for cut in cuts_of(mesh, x, range(2, 2 + nd)):
                check_same_as_serial(
                    lambda t, w=widths: F.pad(t, w, mode=mode), [cut], mesh, output_sharded=True
                )


@pytest.mark.parametrize("mode", MODES)
def test_pad(run_mesh, mesh_shape, mode):
    run_mesh(mesh_shape, paddings, mode=mode)


def constants(mesh) -> None:
    x = numbers(3, 5, 4)
    for dim in range(3):
        for widths in [(1, 1, 0, 2, 3, 0), (-2, 1), (0, 0, -1, -2), (2, 0, 0, 0, -1, -1)]:
            check_same_as_serial(
                lambda t, w=widths: F.pad(t, w, value=1.5), [x], mesh, [Shard(dim)]
            )
    y = F.pad(sharded(torch.arange(6), mesh, 0), (1, 2), value=9)
    assert full(y).tolist() == [9, 0, 1, 2, 3, 4, 5, 9, 9]


def test_constant_pad_of_any_dim(run_mesh, ranks):
    run_mesh((ranks,), constants)


def rows_stay(mesh) -> None:
    x = sharded(arange(1, 1, 8), mesh, 2)
    with shardfield.report() as report:
        y = F.pad(x, (2, 2))
        F.pad(x, (1, 3), mode="replicate")
    assert is_sharded(y) and not report.fallbacks
    assert report.bytes_sent == 0, "neither zeros nor the own edge row may travel"
    with shardfield.report() as report:
        F.pad(x, (1, 1), mode="circular")
    assert report.bytes_sent == 8, "each end sends one row"


def test_interior_rows_stay_with_their_owners(run_mesh):
    run_mesh((2,), rows_stay)


def known_rows(mesh) -> None:
    x = sharded(arange(1, 1, 4), mesh, 2)
    expected = {
        "constant": [0, 0, 0, 1, 2, 3, 0],
        "reflect": [2, 1, 0, 1, 2, 3, 2],
        "replicate": [0, 0, 0, 1, 2, 3, 3],
        "circular": [2, 3, 0, 1, 2, 3, 0],
    }
    for mode, rows in expected.items():
        assert full(F.pad(x, (2, 1), mode=mode)).flatten().tolist() == rows


def test_known_rows(run_mesh, ranks):
    run_mesh((ranks,), known_rows)


def fresh_memory(mesh) -> None:
    x = sharded(arange(1, 1, 4), mesh, 2)
    for mode in MODES:
        y = F.pad(x, (0, 0), mode=mode)
        y.add_(1)
        assert full(x).flatten().tolist() == [0, 1, 2, 3]


def test_zero_padding_copies(run_mesh):
    run_mesh((2,), fresh_memory)


def bad_arguments(mesh) -> None:
    x = sharded(numbers(1, 1, 4), mesh, 2)
    with pytest.raises(RuntimeError, match="Padding size should be less than"):
        F.pad(x, (4, 0), mode="reflect")
    with pytest.raises(RuntimeError, match="wrapping around more than once"):
        F.pad(x, (5, 0), mode="circular")
    with pytest.raises(RuntimeError, match="negative output size"):
        F.pad(x, (-3, -2))


def test_bad_arguments_are_named(run_mesh):
    run_mesh((2,), bad_arguments)
