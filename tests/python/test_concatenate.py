"""cat and stack along whole and cut dims, their kinds, gradients and bytes."""

from __future__ import annotations

import torch
from many_cases import check_cases
from oracle import Cut, arange, assert_equal, check_same_as_serial, is_sharded, numbers, sharded
from torch.distributed.tensor import Shard

import shardfield

PLAIN = numbers(2, 5, 4, seed=5)

CASES = {
    "cat_0": lambda x: torch.cat([x, x * 2], 0),
    "cat_1": lambda x: torch.cat([x * x, x[:, :2], x], 1),
    "cat_last": lambda x: torch.cat([x, x, x.sin()], -1),
    "cat_plain_after": lambda x: torch.cat([x, PLAIN], 1),
    "cat_plain_before": lambda x: torch.cat([PLAIN[:, :1], x], 1),
    "cat_plain_between": lambda x: torch.cat([x, PLAIN, x], 1),
    "cat_legacy_empty": lambda x: torch.cat([torch.zeros(0, dtype=x.dtype), x, x], 1),
    "cat_promotes": lambda x: torch.cat([x, torch.ones(2, 1, 4, dtype=torch.int32)], 1),
    "cat_promotes_sharded": lambda x: torch.cat([x.float(), x.int().double()], 1) + 0 * x.sum(),
    "cat_views": lambda x: torch.cat([x[:, 1:3], x[:, :1]], 1),
    "cat_transposed": lambda x: torch.cat([x.transpose(1, 2), x.transpose(1, 2)], 2),
    "cat_one": lambda x: torch.cat([x], 1) * x,
    "stack_0": lambda x: torch.stack([x, x * 2], 0),
    "stack_2": lambda x: torch.stack([x, x * x], 2),
    "stack_last": lambda x: torch.stack([x, PLAIN.narrow(1, 0, 1).expand(2, 5, 4)], -1),
    "hstack": lambda x: torch.hstack([x, x]),
    "vstack": lambda x: torch.vstack([x, x]),
    "dstack": lambda x: torch.dstack([x, x]),
    "concat": lambda x: torch.concat([x, x], 0),
}


def all_cases(mesh) -> None:
    check_cases(mesh, CASES, numbers(2, 5, 4), (0, 1, 2), output_sharded=True)


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, all_cases)


def operands_cut_otherwise(mesh) -> None:
    """Operands of other borders and other cut dims, and a plain one that wants its gradient."""
    n = mesh.size()
    x, y = numbers(6, 5), numbers(6, 5, seed=1)
    uneven = [1] * (n - 1) + [6 - (n - 1)]
    for dim in (0, 1):
        check_same_as_serial(
            lambda a, b, p, dim=dim: torch.cat([a, b, p], dim),
            [Cut(x, [Shard(0)], {0: uneven}), Cut(y, [Shard(0)], {})],
            mesh,
            plain=[numbers(6, 5, seed=2)],
        )
        check_same_as_serial(
            lambda a, b, dim=dim: torch.cat([a, b], dim),
            [Cut(x, [Shard(0)], {}), Cut(y, [Shard(1)], {})],
            mesh,
        )


def test_operands_cut_otherwise(run_mesh, ranks):
    run_mesh((ranks,), operands_cut_otherwise)


def vectors(mesh) -> None:
    """Empty 1-d pieces stay in the graph: second derivatives exchange on every rank or on none."""
    for sizes in ({}, {0: [5] + [0] * (mesh.size() - 1)}, {0: [0] * (mesh.size() - 1) + [5]}):
        check_same_as_serial(
            lambda x: torch.cat([x.roll(0, 0), x.flip(0)], 0),
            [Cut(numbers(5), [Shard(0)], sizes)],
            mesh,
        )


def test_vectors(run_mesh, ranks):
    run_mesh((ranks,), vectors)


def one_operand_needs_no_messages(mesh) -> None:
    """Plain rows go where their neighbours are: nothing moves."""
    x = sharded(numbers(8, 3), mesh, 0)
    with shardfield.report() as report:
        out = torch.cat([torch.zeros(1, 3, dtype=x.dtype), x, torch.ones(1, 3, dtype=x.dtype)], 0)
        torch.cat([x, x], 1)
        torch.stack([x, x], 0)
    assert is_sharded(out) and out.shape == (10, 3)
    assert report.bytes_sent == 0, report


def test_one_operand_needs_no_messages(run_mesh):
    run_mesh((4,), one_operand_needs_no_messages)


def stack_gradients(mesh) -> None:
    parts = [sharded(arange(2, 4), mesh, 1).requires_grad_() for _ in range(2)]
    (torch.stack(parts, 0) * arange(2, 2, 4)).sum().backward()
    for i, part in enumerate(parts):
        assert_equal(part.grad, arange(2, 2, 4)[i], f"gradient {i}")


def test_B15_gradient_of_stack(run_mesh):
    run_mesh((2,), stack_gradients)


def bad_sizes(mesh) -> None:
    x = sharded(numbers(4, 3), mesh, 0)
    for parts, dim in (([x, numbers(4, 4)], 0), ([x, numbers(4, 3, 1)], 1)):
        try:
            torch.cat(parts, dim)
        except RuntimeError as error:
            assert "cat" in str(error) and "tensor 1" in str(error), error
        else:
            raise AssertionError("cat accepted sizes that do not fit")


def test_bad_sizes(run_mesh):
    run_mesh((2,), bad_sizes)
