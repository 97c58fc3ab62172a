"""Halo, ring and all-reduce inside local_map, against the serial program."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, check_same_as_serial, is_sharded, numbers, scatter
from shardfield.domain_parallel import all_reduce, halo_exchange, local_map, ring_shift
from torch.distributed.tensor import Partial, Replicate, Shard

SIZES = {1: [9], 2: [7, 2], 3: [4, 0, 5], 4: [1, 3, 0, 5]}
WIDTHS = [(1, 1), (2, 0), (0, 3), (3, 4)]


def cut_rows(mesh, x, dim: int = 0) -> Cut:
    """`x` cut unevenly along `dim` by the mesh's last axis, whole on the others."""
    axis = mesh.ndim - 1
    placements = [Replicate()] * axis + [Shard(dim)]
    return Cut(x, placements, {axis: SIZES[mesh.size(axis)]})


def windows_of(padded: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """A stencil that weighs every neighbour differently and is not linear."""
    n = padded.shape[0] - low - high
    return sum((k + 1) * padded[k : k + n].sin() for k in range(low + high + 1))


def serial_pad(x: torch.Tensor, low: int, high: int, mode: str) -> torch.Tensor:
    if mode == "constant":
        return F.pad(x, (0, 0, low, high), value=0.5)
    return F.pad(x.t()[None], (low, high), mode=mode)[0].t()


def halo(mesh, mode: str, known: bool) -> None:
    cut = cut_rows(mesh, numbers(9, 3))
    axis = mesh.ndim - 1
    for low, high in WIDTHS:
        sizes = SIZES[mesh.size(axis)] if known else None

        def piecewise(x, low=low, high=high, sizes=sizes):
            wide = halo_exchange(
                x, mesh, 0, (low, high), axis=axis, mode=mode, value=0.5, sizes=sizes
            )
            assert wide.shape[0] == x.shape[0] + low + high
            return windows_of(wide, low, high)

        def function(x, piecewise=piecewise, low=low, high=high):
            if not is_sharded(x):
                return windows_of(serial_pad(x, low, high, mode), low, high)
            return local_map(piecewise, [cut.placements], cut.placements, mesh)(x)

        check_same_as_serial(function, [cut], mesh, output_sharded=True)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_halo_equals_padding(run_mesh, mesh_shape, mode):
    run_mesh(mesh_shape, halo, mode=mode, known=mode == "circular")


def open_ends(mesh) -> None:
    axis = mesh.ndim - 1
    sizes = SIZES[mesh.size(axis)]
    begin = sum(sizes[: mesh.get_local_rank(axis)])
    end = begin + sizes[mesh.get_local_rank(axis)]
    x = numbers(9, 3)
    got = halo_exchange(x[begin:end], mesh, 0, (2, 1), axis=axis)
    assert_equal(got, x[max(begin - 2, 0) : min(end + 1, 9)], "open ends")
    columns = halo_exchange(x.t()[:, begin:end], mesh, -1, (2, 1), axis=axis)
    assert_equal(columns, got.t(), "strided columns")
    flags = halo_exchange(x[begin:end] > 0, mesh, 0, (2, 1), axis=axis, mode="circular")
    assert flags.dtype == torch.bool and flags.shape[0] == end - begin + 3


def test_open_ends(run_mesh, mesh_shape):
    run_mesh(mesh_shape, open_ends)


def corners(mesh) -> None:
    """A 9-point stencil on a grid cut along both dims: one exchange after the other."""
    placements = [Shard(0), Shard(1)]
    cut = Cut(numbers(7, 8), placements, {0: [5, 2], 1: [1, 7]})
    weights = numbers(3, 3, seed=1)

    def stencil(padded, w):
        return F.conv2d(padded[None, None], w[None, None])[0, 0].tanh()

    def piecewise(x, w):
        for axis in (0, 1):
            x = halo_exchange(x, mesh, axis, 1, axis=axis, mode="circular")
        return stencil(x, w)

    def function(x, w):
        if not is_sharded(x):
            return stencil(F.pad(x[None], (1, 1, 1, 1), mode="circular")[0], w)
        whole = [Replicate(), Replicate()]
        return local_map(piecewise, [placements, whole], placements, mesh)(x, w)

    check_same_as_serial(function, [cut], mesh, plain=[weights], output_sharded=True)


def test_corners_of_a_plate(run_mesh):
    run_mesh((2, 2), corners)


def ring(mesh) -> None:
    """All pairs of rows, every block visiting every rank."""
    axis = mesh.ndim - 1
    cut = cut_rows(mesh, numbers(9, 3))

    def pairs(x, y):
        return (x @ y.t()).sin().square().sum(1)

    def piecewise(x):
        block, total = x, torch.zeros(x.shape[0], dtype=x.dtype)
        for _ in range(mesh.size(axis)):
            total = total + pairs(x, block)
            block = ring_shift(block, mesh, axis=axis)
        return total

    def function(x):
        if not is_sharded(x):
            return pairs(x, x)
        return local_map(piecewise, [cut.placements], cut.placements, mesh)(x)

    check_same_as_serial(function, [cut], mesh, output_sharded=True)


def shifts(mesh) -> None:
    axis = mesh.ndim - 1
    count, here = mesh.size(axis), mesh.get_local_rank(axis)
    sizes = SIZES[count]
    mine = torch.full((2, sizes[here]), float(here), dtype=torch.float64, requires_grad=True)
    for shift in (1, -1, 2, 0):
        source = (here - shift) % count
        got = ring_shift(mine, mesh, shift, dim=1, axis=axis, sizes=sizes)
        assert_equal(
            got, torch.full((2, sizes[source]), float(source), dtype=torch.float64), "ring"
        )
        (grad,) = torch.autograd.grad(got.sum() * (here + 1), mine)
        assert_equal(
            grad, torch.full_like(mine, float((here + shift) % count + 1)), "opposite shift"
        )


@pytest.mark.parametrize("case", [ring, shifts])
def test_ring(run_mesh, mesh_shape, case):
    run_mesh(mesh_shape, case)


def normalized(mesh, op: str) -> None:
    """Rows scaled by a statistic of all rows: an all-reduce in the middle of the program."""
    axis = mesh.ndim - 1
    cut = cut_rows(mesh, numbers(9, 3))
    rows = 9

    def statistic(x):
        if op == "sum":
            return x.square().sum(0)
        return x.square().sum(0) / rows if op == "mean" else getattr(x, f"a{op}")(0)

    def piecewise(x):
        if op == "sum":
            part = x.square().sum(0)
        elif op == "mean":  # the mean of the ranks' sums, times their number
            part = x.square().sum(0) * mesh.size(axis) / rows
        elif x.shape[0]:
            part = getattr(x, f"a{op}")(0)
        else:
            part = x.sum(0) + (float("-inf") if op == "max" else float("inf"))
        return (x * all_reduce(part, mesh, op, axis=axis)).sin()

    def function(x):
        if not is_sharded(x):
            return (x * statistic(x)).sin()
        return local_map(piecewise, [cut.placements], cut.placements, mesh)(x)

    check_same_as_serial(function, [cut], mesh, output_sharded=True)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "min"])
def test_all_reduce_inside(run_mesh, mesh_shape, op):
    run_mesh(mesh_shape, normalized, op=op)


def reduced_over_both(mesh) -> None:
    cut = Cut(numbers(7, 8), [Shard(0), Shard(1)], {0: [5, 2], 1: [1, 7]})

    def piecewise(x):
        return (x * all_reduce(x.square().sum(), mesh)).sum()

    def function(x):
        if not is_sharded(x):
            return (x * x.square().sum()).sum()
        return local_map(piecewise, [cut.placements], [Partial(), Partial()], mesh)(x)

    check_same_as_serial(function, [cut], mesh, output_sharded=False)


def test_all_reduce_over_two_axes(run_mesh):
    run_mesh((2, 2), reduced_over_both)


def refusals(mesh) -> None:
    piece = scatter(cut_rows(mesh, numbers(9, 3)), mesh).to_local()
    rank = mesh.get_rank()
    cases = [
        (lambda: halo_exchange(piece, mesh, 2), "expected a dim of the piece of 2 dims, got 2"),
        (lambda: halo_exchange(piece, mesh, 0, axis="y"), "expected axis to be a mesh axis"),
        (lambda: halo_exchange(piece, mesh, 0, (-1, 1)), "at least 0 rows per side"),
        (lambda: halo_exchange(piece, mesh, 0, mode="zeros"), "expected mode to be one of"),
        (lambda: halo_exchange(piece, mesh, 0, 9, mode="reflect"), "at least 10 rows in all"),
        (lambda: halo_exchange(piece, mesh, 0, sizes=[1, 8]), "this rank's . among them"),
        (lambda: ring_shift(piece[:, : rank + 1], mesh), "differ on dim 0 only"),
        (lambda: ring_shift(piece.float() if rank else piece, mesh), "pieces of one dtype"),
        (lambda: all_reduce(piece, mesh, "median"), "expected op sum, mean, max or min"),
    ]
    for call, text in cases:
        with pytest.raises(ValueError, match=text):
            call()


def test_what_does_not_fit_is_refused(run_mesh):
    run_mesh((2,), refusals)
