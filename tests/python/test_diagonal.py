"""diagonal and trace: a run of the diagonal on every rank, writes through it, gradients."""

from __future__ import annotations

import torch
from many_cases import check_cases
from oracle import assert_equal, is_sharded, numbers, sharded

CASES = {
    "diagonal": lambda x: x.diagonal(0, 1, 2),
    "above": lambda x: x.diagonal(2, 1, 2) ** 2,
    "below": lambda x: x.diagonal(-3, 1, 2) ** 2,
    "outer_dims": lambda x: x.diagonal(-1, 0, 2),
    "swapped": lambda x: x.diagonal(1, 2, 0) * 3,
    "beyond": lambda x: x.diagonal(9, 1, 2),
    "trace": lambda x: torch.trace(x[0]),
    "sum_of": lambda x: torch.diagonal(x, 0, -2, -1).sum(-1),
}


def all_cases(mesh) -> None:
    check_cases(mesh, CASES, numbers(3, 7, 5), (0, 1, 2))


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, all_cases)


def writes(mesh) -> None:
    for dim in (0, 1):
        for offset in (-2, 0, 1):
            ours, want = sharded(numbers(6, 5), mesh, dim), numbers(6, 5)
            view = ours.diagonal(offset)
            assert is_sharded(view)
            assert view.stride() == want.diagonal(offset).stride()
            view.fill_(7)
            want.diagonal(offset).fill_(7)
            assert_equal(ours, want, f"dim {dim}, offset {offset}")


def test_a_write_through_the_diagonal_is_seen(run_mesh, mesh_shape):
    run_mesh(mesh_shape, writes)
