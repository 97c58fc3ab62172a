"""Sorting and selecting: a vector is sorted by all ranks together, never gathered."""

from __future__ import annotations

import pytest
import torch
from many_cases import check_cases
from oracle import Cut, assert_equal, full, is_sharded, numbers, scatter, sharded
from torch.distributed.tensor import Shard

import shardfield

VECTOR = {
    "sort": lambda x: x.sort().values,
    "sort_descending": lambda x: x.sort(descending=True).values ** 2,
    "msort": lambda x: torch.msort(x),
    "topk": lambda x: x.topk(3).values,
    "topk_all": lambda x: x.topk(9, sorted=True).values,
    "smallest": lambda x: x.topk(2, largest=False).values,
    "kthvalue": lambda x: x.kthvalue(4).values,
    "kthvalue_keepdim": lambda x: x.kthvalue(1, keepdim=True).values,
    "median": lambda x: x.median(),
    "median_dim": lambda x: x.median(0).values,
    "nanmedian": lambda x: x.nanmedian(),
    "quantile": lambda x: x.quantile(0.3),
}
MATRIX = {
    "median_all": lambda x: x.median(),
    "nanmedian_all": lambda x: x.nanmedian() * 2,
    "topk_0": lambda x: x.topk(2, 0).values,
    "topk_1": lambda x: x.topk(3, 1, largest=False).values,
    "sort_0": lambda x: x.sort(0).values,
    "kthvalue_1": lambda x: x.kthvalue(2, 1).values,
}


def same_as_serial(mesh) -> None:
    if mesh.ndim == 1:
        check_cases(mesh, VECTOR, numbers(9), (0,))
    check_cases(mesh, MATRIX, numbers(5, 7), (0, 1))


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, same_as_serial)


def on_two_axes(mesh) -> None:
    x = numbers(23)
    vector = scatter(Cut(x, [Shard(0), Shard(0)], {}), mesh)
    for ours, serial in zip(vector.sort(), x.sort(), strict=True):
        assert_equal(full(ours), serial, "sort")


def test_a_vector_cut_by_both_axes(run_mesh):
    run_mesh((2, 2), on_two_axes)


def ties_and_nan(mesh) -> None:
    """Positions among equal values, NaN, infinities, integers, bools and half types."""
    tied = numbers(40).mul(2).round()
    tied[3] = tied[30] = torch.nan
    tied[5], tied[6] = torch.inf, -torch.inf
    whole = tied.nan_to_num(0.0, 9.0, -9.0)
    for x in (tied, whole.long(), whole.to(torch.int8), whole > 0, whole.half(), tied.bfloat16()):
        for descending in (False, True):
            got = torch.sort(sharded(x, mesh, 0), stable=True, descending=descending)
            want = torch.sort(x, stable=True, descending=descending)
            assert_equal(full(got.indices), want.indices, f"{x.dtype} {descending}")
            assert_equal(full(got.values), want.values, f"{x.dtype} {descending}")
            assert_equal(
                full(sharded(x, mesh, 0).argsort(stable=True, descending=descending)),
                want.indices,
                "argsort",
            )
    for op in (torch.median, torch.nanmedian):
        assert_equal(full(op(sharded(tied, mesh, 0))), op(tied), op.__name__)
        assert_equal(full(op(sharded(whole, mesh, 0), 0).values), op(whole, 0).values, "dim")
        nothing_else = torch.full((5,), torch.nan)
        assert_equal(full(op(sharded(nothing_else, mesh, 0))), op(nothing_else), "only NaN")
    for length in (0, 1, 2):
        assert_equal(
            full(sharded(tied[:length], mesh, 0).sort()[0]), tied[:length].sort()[0], "short"
        )


def test_ties_nan_and_dtypes(run_mesh, mesh_shape):
    run_mesh(mesh_shape, ties_and_nan)


def uneven(mesh) -> None:
    """Presorted, reversed, equal, all on one rank."""
    n = 50
    heavy = [0] * (mesh.size(mesh.ndim - 1) - 1) + [n]
    for x in (torch.arange(n), torch.arange(n).flip(0), torch.zeros(n), numbers(n)):
        for sizes in (None, heavy):
            got = sharded(x, mesh, 0, sizes).sort(stable=True)
            assert is_sharded(got.values)
            for ours, serial in zip(got, x.sort(stable=True), strict=True):
                assert_equal(full(ours), serial, "sort")


def test_skewed_vectors(run_mesh, mesh_shape):
    run_mesh(mesh_shape, uneven)


def volume(mesh) -> tuple[int, dict[str, int]]:
    x = sharded(numbers(4000), mesh, 0)
    with shardfield.report() as report:
        x.sort()
        x.topk(5)
        x.median()
    return report.bytes_sent, dict(report.fallbacks)


@pytest.mark.parametrize("size", [2, 4])
def test_a_vector_is_not_gathered(run_mesh, size):
    """Value and index of each element travel at most twice per sort (two sorts), and samples."""
    results = run_mesh((size,), volume)
    assert not any(fallbacks for _, fallbacks in results)
    assert sum(sent for sent, _ in results) <= 2 * 2 * 4000 * 16 + 4000 * size


def wrong_k(mesh) -> None:
    x = sharded(numbers(8), mesh, 0)
    for call in (lambda: x.topk(9), lambda: x.kthvalue(9), lambda: x.kthvalue(0)):
        with pytest.raises(RuntimeError, match="out of range"):
            call()
    assert_equal(full(x.sort().values), numbers(8).sort().values, "still usable")


def test_k_out_of_range(run_mesh):
    run_mesh((3,), wrong_k)
