"""Tensor.unfold along a cut dim: windows that reach over the border."""

from __future__ import annotations

import torch
from many_cases import check_cases
from oracle import is_sharded, numbers, sharded

CASES = {
    "step_1": lambda x: x.unfold(1, 3, 1),
    "step_2": lambda x: x.unfold(1, 3, 2) ** 2,
    "apart": lambda x: x.unfold(1, 2, 4),
    "whole": lambda x: x.unfold(1, 9, 1).sum(-1),
    "last": lambda x: x.unfold(2, 2, 2) * 3,
    "twice": lambda x: x.unfold(1, 3, 3).unfold(2, 2, 2),
    "moving_mean": lambda x: x.unfold(-2, 5, 1).mean(-1),
}


def all_cases(mesh) -> None:
    check_cases(mesh, CASES, numbers(2, 9, 4), (0, 1, 2))


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, all_cases)


def refusals(mesh) -> list[str]:
    x = sharded(numbers(2, 9), mesh, 1)
    texts = []
    windows = x.unfold(1, 3, 1)
    assert is_sharded(windows)
    for call in (lambda: windows.mul_(2), lambda: x.unfold(1, 10, 1), lambda: x.unfold(1, 3, 0)):
        try:
            call()
        except RuntimeError as error:
            texts.append(str(error))
    windows.clone().mul_(2)
    assert torch.equal(x.full_tensor(), numbers(2, 9))
    return texts


def test_a_write_into_the_windows_and_bad_sizes_are_refused(run_mesh):
    write, size, step = run_mesh((2,), refusals)[0]
    assert "clone" in write
    assert "10" in size
    assert "step" in step
