"""Places of nonzeros, distinct values and lists written to a mask's places."""

from __future__ import annotations

import pytest
import torch
from many_cases import check_cases, layouts_of
from oracle import assert_equal, full, is_sharded, numbers, scatter, sharded

import shardfield


def places(mesh) -> None:
    x = numbers(5, 4, 3).mul(2).round()
    for name, cut in layouts_of(mesh, (0, 1, 2), x):
        s = scatter(cut, mesh)
        got = s.nonzero()
        assert is_sharded(got)
        assert_equal(full(got), x.nonzero(), name)
        assert_equal(full(torch.argwhere(s)), torch.argwhere(x), name)
        for ours, serial in zip(s.nonzero(as_tuple=True), x.nonzero(as_tuple=True), strict=True):
            assert_equal(full(ours), serial, name)
        for size in (0, 7, 60):
            got = torch.nonzero_static(s, size=size, fill_value=-3)
            assert_equal(full(got), torch.nonzero_static(x, size=size, fill_value=-3), name)
    none = torch.zeros(4, 2)
    assert_equal(full(sharded(none, mesh, 0).nonzero()), none.nonzero(), "no nonzero")


def distinct(mesh) -> None:
    x = numbers(5, 6).mul(2).round()
    for name, cut in layouts_of(mesh, (0, 1), x):
        got = torch.unique(scatter(cut, mesh), return_inverse=True, return_counts=True)
        want = torch.unique(x, return_inverse=True, return_counts=True)
        for ours, serial in zip(got, want, strict=True):
            assert_equal(full(ours), serial, name)
        assert is_sharded(got[1])
    words = torch.tensor([3, 1, 3, 3, 2])
    assert_equal(full(sharded(words, mesh, 0).unique()), words.unique(), "one list")


@pytest.mark.parametrize("check", [places, distinct])
def test_same_as_serial(run_mesh, mesh_shape, check):
    run_mesh(mesh_shape, check)


MASK = numbers(5, 4, seed=3) > 0
SOURCE = numbers(20, seed=4)
WRITES = {
    "masked_scatter": lambda x: x.masked_scatter(MASK, SOURCE),
    "broadcast_mask": lambda x: x.masked_scatter(MASK[:, :1], SOURCE),
    "mask_of_x": lambda x: x.masked_scatter(x.detach() > 0, SOURCE) ** 2,
}


def writes(mesh) -> None:
    check_cases(mesh, WRITES, numbers(5, 4), (0, 1))
    weight = SOURCE.clone().requires_grad_()
    sharded(numbers(5, 4), mesh, 1).masked_scatter(MASK, weight).square().sum().backward()
    serial = SOURCE.clone().requires_grad_()
    numbers(5, 4).masked_scatter(MASK, serial).square().sum().backward()
    assert_equal(weight.grad, serial.grad, "source gradient")
    x = sharded(numbers(5, 4), mesh, 0)
    x.masked_scatter_(sharded(MASK, mesh, 1), SOURCE)
    assert_equal(full(x), numbers(5, 4).masked_scatter_(MASK, SOURCE), "in place")
    with pytest.raises(RuntimeError, match="source of at least"):
        x.masked_scatter(MASK, SOURCE[:2])


def test_masked_scatter(run_mesh, mesh_shape):
    run_mesh(mesh_shape, writes)


def quiet(mesh) -> dict[str, int]:
    x = sharded(numbers(6, 5).round(), mesh, 1)
    with shardfield.report() as report:
        x.nonzero()
        x.unique()
        x.masked_scatter(x > 0, numbers(30))
    return dict(report.fallbacks)


def test_nothing_is_gathered(run_mesh):
    assert run_mesh((3,), quiet) == [{}] * 3
