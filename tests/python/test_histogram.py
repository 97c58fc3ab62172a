"""Counting and looking up: each rank counts its own elements, counts are summed."""

from __future__ import annotations

import pytest
import torch
from oracle import assert_equal, full, is_sharded, numbers, sharded

import shardfield


def counts(mesh) -> None:
    x, weight = numbers(6, 7), numbers(6, 7, seed=1).abs()
    for dim in (0, 1):
        s, w = sharded(x, mesh, dim), sharded(weight, mesh, dim)
        for ends in ({}, {"min": -1.0, "max": 0.5}):
            assert_equal(full(s.histc(5, **ends)), x.histc(5, **ends), "histc")
        for options in ({}, {"range": (-1.0, 1.5)}, {"density": True}, {"range": (0.0, 0.0)}):
            for mine, theirs in ((None, None), (w, weight), (weight, weight)):
                got = torch.histogram(s, 4, weight=mine, **options)
                want = torch.histogram(x, 4, weight=theirs, **options)
                assert_equal(full(got.hist), want.hist, f"histogram {options}")
                assert_equal(full(got.bin_edges), want.bin_edges, f"edges {options}")
        edges = torch.tensor([-2.0, -0.3, 0.1, 3.0], dtype=torch.float64)
        for density in (False, True):
            got = torch.histogram(s, edges, density=density)
            assert_equal(full(got.hist), torch.histogram(x, edges, density=density).hist, "edges")
    flat = torch.full((5,), 2.0)
    assert_equal(full(sharded(flat, mesh, 0).histc(3)), flat.histc(3), "one value")


def bins(mesh) -> None:
    values = torch.tensor([0, 3, 3, 1, 7, 0, 3])
    weight = numbers(7)
    s = sharded(values, mesh, 0)
    for least in (0, 12):
        assert_equal(full(s.bincount(minlength=least)), values.bincount(minlength=least), "plain")
        for mine in (weight, sharded(weight, mesh, 0)):
            assert_equal(
                full(s.bincount(mine, minlength=least)),
                values.bincount(weight, minlength=least),
                "weights",
            )
    assert_equal(
        full(values.bincount(sharded(weight, mesh, 0))), values.bincount(weight), "sharded weights"
    )
    with pytest.raises(RuntimeError, match="non-negative"):
        sharded(values - 1, mesh, 0).bincount()


def lookups(mesh) -> None:
    edges = numbers(11).sort().values
    rows = numbers(4, 9).sort(1).values
    values = numbers(4, 6, seed=2)
    values[0, 0] = edges[3]
    for right in (False, True):
        for dim in (0, 1):
            s = sharded(values, mesh, dim)
            want = torch.bucketize(values, edges, right=right)
            got = torch.bucketize(s, edges, right=right)
            assert is_sharded(got)
            assert_equal(full(got), want, "values cut")
            for values_form in (values, s):
                got = torch.bucketize(values_form, sharded(edges, mesh, 0), right=right)
                assert_equal(full(got), want, "edges cut")
                for rows_form in (rows, sharded(rows, mesh, 0), sharded(rows, mesh, 1)):
                    got = torch.searchsorted(rows_form, values_form, right=right)
                    assert_equal(full(got), torch.searchsorted(rows, values, right=right), "rows")
    shuffled = numbers(9, seed=5)
    order = shuffled.argsort()
    for form in (order, sharded(order, mesh, 0)):
        got = torch.searchsorted(sharded(shuffled, mesh, 0), values, sorter=form)
        assert_equal(full(got), torch.searchsorted(shuffled, values, sorter=order), "sorter")
    assert int(torch.bucketize(0.25, sharded(edges, mesh, 0))) == int(torch.bucketize(0.25, edges))
    with pytest.raises(RuntimeError, match="boundaries tensor"):
        torch.searchsorted(sharded(rows, mesh, 0), values[:3])


@pytest.mark.parametrize("check", [counts, bins, lookups])
def test_same_as_serial(run_mesh, mesh_shape, check):
    run_mesh(mesh_shape, check)


def quiet(mesh) -> dict[str, int]:
    x = sharded(numbers(50), mesh, 0)
    with shardfield.report() as report:
        x.histc(4)
        torch.histogram(x, 4)
        torch.bucketize(x, numbers(5).sort().values)
        torch.searchsorted(x.sort().values, numbers(5))
        x.mul(3).abs().long().bincount()
    return dict(report.fallbacks)


def test_nothing_is_gathered(run_mesh):
    assert run_mesh((3,), quiet) == [{}] * 3


def few_elements(mesh) -> None:
    """The sums of weights keep the weights' type where a rank has nothing to count."""
    values = torch.tensor([1, 0])
    for dtype in (torch.float32, torch.float64, torch.int64):
        weight = torch.tensor([2, 3], dtype=dtype)
        assert_equal(
            full(sharded(values, mesh, 0).bincount(sharded(weight, mesh, 0))),
            values.bincount(weight),
            str(dtype),
        )


def test_bincount_of_fewer_elements_than_ranks(run_mesh):
    run_mesh((4,), few_elements)
