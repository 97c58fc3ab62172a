"""Published cases, kind C: reductions, pending sums, positions of extrema, norms."""

from __future__ import annotations

import pytest
import torch
from oracle import Cut, arange, assert_equal, check_same_as_serial, is_sharded, numbers, sharded
from shardfield.domain_parallel import shard_tensor
from torch import nn
from torch.distributed.tensor import Shard


def mean_of_uneven_rows(mesh) -> None:
    x = sharded(arange(3, 4), mesh, 0, [2, 1])
    assert float(x.mean()) == 5.5
    assert not is_sharded(x.mean())
    assert x.mean(0).tolist() == [4, 5, 6, 7]
    one = shard_tensor(arange(1, 4), mesh, [Shard(0)])
    assert float(one.mean()) == 1.5
    check_same_as_serial(lambda t: t.mean(), [arange(3, 4)], mesh, [Shard(0)], sizes={0: [2, 1]})
    check_same_as_serial(lambda t: t.mean(0), [arange(3, 4)], mesh, [Shard(0)], sizes={0: [2, 1]})
    check_same_as_serial(lambda t: t.mean(), [arange(1, 4)], mesh, [Shard(0)])


def test_C1_mean_is_weighted_by_real_counts(run_mesh):
    run_mesh((2,), mean_of_uneven_rows)


def no_pending_sums(mesh) -> None:
    x = sharded(arange(4) + 1, mesh, 0)
    p = (x * x).sum()
    assert not is_sharded(p)
    values = [p, p * 2, p * 3, p / 2, p + 1, 1 - p, p + p, p * p, torch.dot(x, x)]
    assert [float(v) for v in values] == [30, 60, 90, 15, 31, -29, 60, 900, 30]


def test_C3_sums_are_complete_before_anything_else(run_mesh):
    run_mesh((2,), no_pending_sums)


def positions(mesh) -> None:
    assert int(sharded(torch.tensor([10.0, 5, 3, 8]), mesh, 0, [2, 2]).argmax()) == 0
    x = sharded(torch.tensor([1.0, 5, 3, 8, 8, 2]), mesh, 0, [3, 3])
    value, index = x.max(0)
    assert (float(value), int(index)) == (8, 3)
    assert int(sharded(torch.tensor([4.0, 9]), mesh, 0, [0, 2]).argmax()) == 1
    y = numbers(5, 6)
    for op in (torch.max, torch.min):
        value, index = op(sharded(y, mesh, 0, [4, 1]), 0)
        assert_equal(value, op(y, 0).values, "values")
        assert_equal(index, op(y, 0).indices, "positions")
        value, index = op(sharded(y, mesh, 0, [4, 1]), 1)
        assert is_sharded(value) and is_sharded(index)
        assert_equal(index, op(y, 1).indices, "positions along a whole dim")
    assert_equal(sharded(y, mesh, 0).argmin(), y.argmin(), "argmin")
    assert_equal(sharded(y, mesh, 0).argmax(0), y.argmax(0), "argmax(0)")


def test_C5_positions_are_global_and_the_first_tie_wins(run_mesh):
    run_mesh((2,), positions)


def extrema_with_an_empty_rank(mesh) -> None:
    for dtype in (torch.float64, torch.int64, torch.int32, torch.uint8):
        x = sharded(torch.tensor([3, 1, 2], dtype=dtype), mesh, 0, [1, 1, 1, 0])
        assert (int(x.min()), int(x.max()), int(x.argmin())) == (1, 3, 1)
        assert x.min().dtype == dtype
    y = torch.tensor([1.0, float("nan"), 3, 2, -1])
    for at in range(4):
        sizes = [1, 1, 1, 1]
        sizes[at] = 2
        x = sharded(y, mesh, 0, sizes)
        assert bool(x.max().isnan()) and bool(x.amin().isnan())


def test_C7_extrema_with_an_empty_rank_and_nan(run_mesh):
    run_mesh((4,), extrema_with_an_empty_rank)


def flags_do_not_wrap(mesh) -> None:
    flags = sharded(torch.ones(256, dtype=torch.uint8), mesh, 0)
    assert bool(flags.any()) and bool(flags.all())
    assert int(flags.sum()) == 256
    mixed = torch.zeros(256, dtype=torch.bool)
    mixed[200] = True
    x = sharded(mixed, mesh, 0)
    assert bool(x.any()) and not bool(x.all()) and int(x.sum()) == 1


def test_C9_flags_do_not_wrap_to_success(run_mesh):
    run_mesh((4,), flags_do_not_wrap)


def running_statistics(mesh, sizes: list[int]) -> None:
    norm = nn.BatchNorm1d(1, momentum=0.1).double()
    check_same_as_serial(norm, [Cut(arange(5, 1), [Shard(0)], {0: sizes})], mesh)
    assert norm.running_mean.item() == pytest.approx(0.2)
    assert norm.running_var.item() == pytest.approx(1.15)
    assert int(norm.num_batches_tracked) == 1


@pytest.mark.parametrize("sizes", [[3, 2], [3, 2, 0], [4, 1], [0, 5]], ids=str)
def test_C11_running_variance_is_weighted_by_counts(run_mesh, sizes):
    run_mesh((len(sizes),), running_statistics, sizes=sizes)


def layer_norm_weight_gradient(mesh) -> None:
    norm = nn.LayerNorm(2, eps=0.0).double()
    x = sharded(arange(8, 2), mesh, 0, [3, 3, 2])
    (norm(x) * (arange(8, 1) + 1)).sum().backward()
    assert norm.weight.grad.tolist() == pytest.approx([-36.0, 36.0])
    usual = nn.LayerNorm(2).double()
    (usual(x) * (arange(8, 1) + 1)).sum().backward()
    assert usual.weight.grad.tolist() == pytest.approx([-35.999, 35.999], abs=1e-3)


def test_C13_layer_norm_weight_gradient_is_summed(run_mesh):
    run_mesh((3,), layer_norm_weight_gradient)


REDUCTIONS = {
    "sum": lambda x: x.sum(),
    "sum_cut": lambda x: x.sum(1),
    "sum_whole": lambda x: x.sum(0),
    "sum_keepdim": lambda x: x.sum(1, keepdim=True),
    "sum_two": lambda x: x.sum((0, 1)),
    "mean": lambda x: x.mean(),
    "mean_cut": lambda x: x.mean((1, 2)),
    "mean_keepdim": lambda x: x.mean(-1, keepdim=True),
    "amax_cut": lambda x: x.amax(1),
    "amin_whole": lambda x: x.amin(2),
    "max": lambda x: x.max(),
    "min_dim": lambda x: x.min(1).values,
    "prod": lambda x: x.prod(),
    "prod_cut": lambda x: x.prod(1),
    "norm": lambda x: x.norm(),
    "vector_norm_cut": lambda x: torch.linalg.vector_norm(x, 3, 1),
    "var": lambda x: x.var(),
    "var_cut": lambda x: x.var(1, keepdim=True),
    "std_cut": lambda x: x.std((0, 1), correction=0),
    "var_mean": lambda x: torch.var_mean(x, (1, 2)),
    "logsumexp_cut": lambda x: x.logsumexp(1),
    "softmax_cut": lambda x: x.softmax(1),
    "softmax_whole": lambda x: x.softmax(2),
    "log_softmax_cut": lambda x: x.log_softmax(1),
}


def reduction(mesh, name: str, sizes: list[int] | None) -> None:
    check_same_as_serial(
        REDUCTIONS[name],
        [numbers(2, 7, 3)],
        mesh,
        [Shard(1)],
        sizes={0: sizes} if sizes else None,
    )


@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions_even_uneven_and_empty(run_mesh, name):
    run_mesh((2,), reduction, name=name, sizes=None)
    run_mesh((3,), reduction, name=name, sizes=[6, 0, 1])
    run_mesh((4,), reduction, name=name, sizes=None)
