"""scatter, index_add and their kin: writes by position into a sharded tensor."""

from __future__ import annotations

import pytest
import torch
from many_cases import check_cases
from oracle import assert_equal, numbers, sharded

ROWS = torch.tensor([6, 0, 3, 3])
ELEMENTS = (numbers(2, 4, 5, seed=2) * 10).long().abs() % 7
SOURCE = numbers(2, 4, 5, seed=3)
SHORT = ELEMENTS[:1, :3, :2]

CASES = {
    "scatter": lambda x: x.scatter(1, torch.tensor([5, 1]).view(1, 2, 1).expand(2, 2, 5), SOURCE),
    "scatter_value": lambda x: x.scatter(1, ELEMENTS, 3.0),
    "scatter_add": lambda x: x.scatter_add(1, ELEMENTS, SOURCE),
    "scatter_add_short": lambda x: x.scatter_add(1, SHORT, SOURCE),
    "scatter_add_self": lambda x: x.scatter_add(1, ELEMENTS, x[:, :4] * 2),
    "scatter_add_last": lambda x: x.scatter_add(2, ELEMENTS[..., :3] % 5, SOURCE[..., :3]),
    "sum": lambda x: x.scatter_reduce(1, ELEMENTS, SOURCE, "sum", include_self=False),
    "mean": lambda x: x.scatter_reduce(1, ELEMENTS, SOURCE, "mean"),
    "amax": lambda x: x.scatter_reduce(1, ELEMENTS, SOURCE, "amax"),
    "index_add": lambda x: x.index_add(1, ROWS, SOURCE, alpha=2),
    "index_add_0": lambda x: x.index_add(0, torch.tensor([1, 1, 0]), x[[0, 1, 0]]),
    "index_copy": lambda x: x.index_copy(1, torch.tensor([6, 0, 3, 2]), SOURCE),
    "index_fill": lambda x: x.index_fill(1, torch.tensor([-1, 0]), 4.0) * x,
    "index_fill_tensor": lambda x: x.index_fill(2, torch.tensor([1]), torch.tensor(2.0).double()),
    "in_place": lambda x: (x * 1).index_add_(1, ROWS, SOURCE).scatter_add_(1, ELEMENTS, SOURCE),
}


def all_cases(mesh) -> None:
    check_cases(mesh, CASES, numbers(2, 7, 5), (0, 1, 2), second=False)


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, all_cases, limit_s=180)


def source_gradients(mesh) -> None:
    """The gradient of a plain source is plain and whole; so is a second derivative through it."""
    for dim in (0, 1):
        results = []
        for x in (numbers(2, 7), sharded(numbers(2, 7), mesh, dim)):
            x = x.clone().requires_grad_()
            source = numbers(2, 4, seed=4).requires_grad_()
            y = x.index_add(1, ROWS, source * source)
            (g,) = torch.autograd.grad((y * y).sum(), source, create_graph=True)
            g.square().sum().backward()
            results.append([y, g, source.grad, x.grad])
        for got, want in zip(*reversed(results), strict=True):
            assert_equal(got, want, f"dim {dim}", rtol=1e-8)


def test_gradients_of_the_source(run_mesh, ranks):
    run_mesh((ranks,), source_gradients)


def refusals(mesh) -> None:
    x = sharded(numbers(7, 2), mesh, 0)
    with pytest.raises(IndexError, match="out of bounds"):
        x.index_add(0, torch.tensor([7]), numbers(1, 2))
    with pytest.raises(IndexError, match="out of bounds"):
        x.scatter(0, torch.tensor([[-1]]), 1.0)


def test_positions_out_of_bounds_are_refused(run_mesh):
    run_mesh((2,), refusals)
