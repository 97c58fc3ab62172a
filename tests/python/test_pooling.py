"""Pooling: indices, NaN and -inf, divisors, adaptive sizes, what is saved for backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from cuts import cuts_of
from oracle import (
    Cut,
    arange,
    assert_equal,
    check_same_as_serial,
    full,
    is_sharded,
    numbers,
    scatter,
    sharded,
)
from torch.distributed.tensor import Shard

import shardfield

MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}
ADAPTIVE_MEAN = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def known_numbers(mesh) -> None:
    x = sharded(arange(1, 1, 10), mesh, 2).requires_grad_()
    y = F.max_pool1d(x, 3, 2, 1)
    assert full(y).flatten().tolist() == [1, 3, 5, 7, 9]
    y.sum().backward()
    assert full(x.grad).flatten().tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0, 1]
    z = F.avg_pool1d(x, 3, 2, 1, count_include_pad=False)
    assert full(z).flatten().tolist() == [0.5, 2, 4, 6, 8]
    assert is_sharded(y) and is_sharded(z)


def test_D9_pools_of_ten_with_gradient(run_mesh):
    for n in (1, 2, 3, 4):
        run_mesh((n,), known_numbers)


MAX_CASES = [
    (1, (11,), (3,), (2,), (1,), (1,), False),
    (1, (9,), (2,), (3,), (0,), (2,), True),
    (2, (9, 7), (3, 3), (2, 2), (1, 1), (1, 1), False),
    (2, (9, 7), (2, 4), (2, 3), (1, 0), (1, 2), True),
    (2, (8, 6), (2, 2), (2, 2), (0, 0), (1, 1), False),
    (3, (5, 7, 4), (3, 2, 2), (2, 2, 1), (1, 1, 0), (1, 1, 1), True),
]


def max_with_indices(mesh) -> None:
    for nd, shape, k, s, p, d, ceil in MAX_CASES:
        x = numbers(2, 3, *shape, seed=nd)
        for cut in cuts_of(mesh, x, range(2, 2 + nd)):
            check_same_as_serial(
                lambda t, nd=nd, a=(k, s, p, d, ceil): MAX[nd](t, *a, return_indices=True),
                [cut],
                mesh,
                output_sharded=True,
            )
        for dim in (0, 1):
            check_same_as_serial(
                lambda t, nd=nd, a=(k, s, p, d, ceil): MAX[nd](t, *a, return_indices=True),
                [Cut(x, [Shard(dim)] * mesh.ndim)],
                mesh,
            )


def test_max_pool_with_indices(run_mesh, mesh_shape):
    run_mesh(mesh_shape, max_with_indices)


def odd_values(mesh) -> None:
    inf, nan = float("inf"), float("nan")
    x = numbers(1, 1, 8, 6, seed=3)
    x[0, 0, :3] = -inf
    x[0, 0, 5, 2] = nan
    x[0, 0, 7, 5] = nan
    x[0, 0, 4, 0] = inf
    for a in [(3, 2, 1), (3, 1, 1), (2, 2, 0), (3, 2, 1, 2)]:
        for cut in cuts_of(mesh, x, [2, 3]):
            serial = x.clone().requires_grad_()
            t = scatter(cut, mesh).requires_grad_()
            y0, i0 = F.max_pool2d(serial, *a, return_indices=True)
            y, i = F.max_pool2d(t, *a, return_indices=True)
            assert_equal(y, y0, f"values {a} {cut.sizes}")
            assert_equal(i, i0, f"indices {a} {cut.sizes}")
            w = numbers(*y0.shape, seed=4)
            (y0 * w).sum().backward()
            (y * w).sum().backward()
            finite = serial.grad.isnan().logical_not()
            assert_equal(full(t.grad)[finite], serial.grad[finite], f"gradient {a} {cut.sizes}")
    for size in [(1, 1), (3, 2), (1, 4), (5, 1)]:
        for cut in cuts_of(mesh, x, [2, 3]):
            y0, i0 = F.adaptive_max_pool2d(x, size, return_indices=True)
            y, i = F.adaptive_max_pool2d(scatter(cut, mesh), size, return_indices=True)
            assert_equal(y, y0, f"adaptive values {size} {cut.sizes}")
            assert_equal(i, i0, f"adaptive indices {size} {cut.sizes}")


def test_nan_and_infinities_as_on_one_device(run_mesh, mesh_shape):
    run_mesh(mesh_shape, odd_values)


def integers(mesh) -> None:
    x = torch.arange(24).reshape(1, 1, 6, 4) % 7 - 9
    t = sharded(x, mesh, 2)
    y, i = F.max_pool2d(t, 3, 2, 1, return_indices=True)
    y0, i0 = F.max_pool2d(x, 3, 2, 1, return_indices=True)
    assert_equal(y, y0, "values")
    assert_equal(i, i0, "indices")


def test_max_pool_of_integers(run_mesh):
    run_mesh((3,), integers)


def averages(mesh) -> None:
    for nd, shape, k, s, p in [
        (1, (11,), (3,), (2,), (1,)),
        (2, (9, 7), (3, 2), (2, 2), (1, 1)),
        (2, (8, 6), (2, 2), (2, 2), (0, 0)),
        (3, (5, 7, 4), (3, 2, 2), (2, 3, 1), (1, 0, 1)),
    ]:
        pool = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}[nd]
        for options in [
            {},
            {"ceil_mode": True},
            {"count_include_pad": False, "ceil_mode": True},
            {"divisor_override": 5},
        ]:
            if nd == 1 and "divisor_override" in options:
                continue
            x = numbers(2, 3, *shape, seed=nd)
            for cut in cuts_of(mesh, x, range(2, 2 + nd))[:6]:
                check_same_as_serial(
                    lambda t, f=pool, a=(k, s, p), o=options: f(t, *a, **o),
                    [cut],
                    mesh,
                    output_sharded=True,
                )


def test_average_pool(run_mesh, mesh_shape):
    run_mesh(mesh_shape, averages)


def adaptive(mesh, kind: str) -> None:
    pools = ADAPTIVE_MEAN if kind == "mean" else ADAPTIVE_MAX
    options = {} if kind == "mean" else {"return_indices": True}
    for nd, shape, sizes in [
        (1, (11,), [(1,), (3,), (11,), (15,)]),
        (2, (9, 7), [(1, 1), (3, 7), (2, 5), (1, 3), (12, 2)]),
        (3, (5, 7, 4), [(1, 1, 1), (2, 3, 4), (5, 1, 2)]),
    ]:
        for size in sizes:
            x = numbers(2, 3, *shape, seed=nd)
            for cut in cuts_of(mesh, x, range(2, 2 + nd))[:6]:
                check_same_as_serial(lambda t, f=pools[nd], s=size: f(t, s, **options), [cut], mesh)


@pytest.mark.parametrize("kind", ["mean", "max"])
def test_adaptive_pool(run_mesh, mesh_shape, kind):
    run_mesh(mesh_shape, adaptive, kind=kind)


def no_batch(mesh) -> None:
    x = numbers(3, 8, 6)
    for dim in (0, 1, 2):
        for f in (
            lambda t: F.adaptive_avg_pool2d(t, (3, 2)),
            lambda t: F.adaptive_avg_pool2d(t, 1),
            lambda t: F.adaptive_max_pool2d(t, (2, 4)),
            lambda t: F.max_pool2d(t, 3, 2, 1),
            lambda t: F.avg_pool2d(t, 3, 2, 1),
        ):
            check_same_as_serial(f, [x], mesh, [Shard(dim)])


def test_P11_inputs_without_batch_dim(run_mesh):
    for n in (2, 3):
        run_mesh((n,), no_batch)


def one_output_is_plain(mesh) -> None:
    x = sharded(numbers(2, 3, 8, 6), mesh, 2)
    with shardfield.report() as report:
        y = F.adaptive_avg_pool2d(x, 1)
        z = F.adaptive_max_pool2d(x, 1)
    assert not is_sharded(y) and not is_sharded(z)
    assert not report.fallbacks
    assert is_sharded(F.adaptive_avg_pool2d(x, (4, 1)))


def test_one_output_along_the_cut_dim_is_plain(run_mesh):
    run_mesh((2,), one_output_is_plain)


def lp(mesh) -> None:
    for cut in cuts_of(mesh, numbers(1, 2, 9, 7).abs() + 0.5, [2, 3]):
        for norm in (2.0, 3.0):
            check_same_as_serial(
                lambda t, n=norm: F.lp_pool2d(t, n, (3, 2), (2, 2), ceil_mode=True), [cut], mesh
            )


def test_lp_pool(run_mesh, mesh_shape):
    run_mesh(mesh_shape, lp)


def halves(mesh) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x = (numbers(1, 2, 9, 7) * 50).to(dtype)
        for f in (
            lambda t: F.avg_pool2d(t, 3, 2, 1),
            lambda t: F.adaptive_avg_pool2d(t, 1),
            lambda t: F.adaptive_avg_pool2d(t, (4, 3)),
            lambda t: F.max_pool2d(t, 3, 2, 1),
        ):
            y, y0 = f(sharded(x, mesh, 2)), f(x)
            assert y.dtype == dtype
            scale = float(y0.float().abs().max())
            error = float((full(y).float() - y0.float()).abs().max())
            assert error <= 4 * torch.finfo(dtype).eps * scale, f"{dtype}: {error} of {scale}"


def test_narrow_dtypes(run_mesh):
    run_mesh((3,), halves)


def channels_last(mesh) -> None:
    x = numbers(2, 3, 8, 6).contiguous(memory_format=torch.channels_last)
    for dim in (2, 3):
        for f in (
            lambda t: F.max_pool2d(t, 3, 2, 1),
            lambda t: F.avg_pool2d(t, 3, 2, 1),
            lambda t: F.adaptive_avg_pool2d(t, (4, 3)),
            lambda t: F.pad(t, (1, 1, 1, 1), mode="reflect"),
            lambda t: F.interpolate(t, scale_factor=2, mode="bilinear"),
            lambda t: F.pixel_unshuffle(t, 2),
        ):
            t = sharded(x, mesh, dim).contiguous(memory_format=torch.channels_last)
            y, y0 = f(t), f(x)
            assert y.stride() == y0.stride()
            assert_equal(
                y.permute(0, 2, 3, 1).flatten(0, 1) * 1,
                y0.permute(0, 2, 3, 1).flatten(0, 1),
                "rows",
            )


def test_channels_last_is_kept(run_mesh):
    run_mesh((2,), channels_last)


def saved_bytes(f, x: torch.Tensor) -> int:
    """Bytes that autograd keeps, x itself apart."""
    kept = []
    own = x.to_local() if is_sharded(x) else x

    def pack(t: torch.Tensor) -> torch.Tensor:
        local = t.to_local() if is_sharded(t) else t
        if local.data_ptr() != own.data_ptr():
            kept.append(local.untyped_storage().nbytes())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        f(x.requires_grad_())
    return sum(kept)


def lean(mesh) -> None:
    x = numbers(1, 4, 24, 10)
    for f in (
        lambda t: F.max_pool2d(t, 3, 2, 1),
        lambda t: F.max_pool2d(t, 2),
        lambda t: F.avg_pool2d(t, 2),
        lambda t: F.avg_pool2d(t, 3, 2, 1),
    ):
        ours, serial = saved_bytes(f, sharded(x, mesh, 2)), saved_bytes(f, x.clone())
        assert ours <= serial / mesh.size() + 1024, f"{ours} bytes kept, serial {serial}"


def test_backward_keeps_no_more_than_stock(run_mesh):
    run_mesh((2,), lean)


def halo_bytes(mesh) -> None:
    x = sharded(numbers(1, 1, 16), mesh, 2)
    for call, rows in [
        (lambda: F.max_pool1d(x, 3, 2, 1), 1),
        (lambda: F.max_pool1d(x, 2, 2), 0),
        (lambda: F.avg_pool1d(x, 5, 1, 2), 4),
    ]:
        with shardfield.report() as report:
            call()
        total = torch.tensor(float(report.bytes_sent))
        torch.distributed.all_reduce(total)
        assert total.item() == 8 * rows


def test_only_the_overlap_travels(run_mesh):
    run_mesh((2,), halo_bytes)


def bad_arguments(mesh) -> None:
    x = sharded(numbers(1, 2, 6, 5), mesh, 2)
    with pytest.raises(RuntimeError, match="at most half of effective kernel size"):
        F.max_pool2d(x, 3, padding=2)
    with pytest.raises(RuntimeError, match="Output size is too small"):
        F.avg_pool2d(x, 7)
    with pytest.raises(RuntimeError, match="3D or 4D"):
        F.max_pool2d(x[0, 0], 2)
    with pytest.raises(RuntimeError, match="divisor must be not zero"):
        F.avg_pool2d(x, 2, divisor_override=0)


def test_bad_arguments_are_named(run_mesh):
    run_mesh((2,), bad_arguments)
