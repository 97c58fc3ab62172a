"""CASES, kind I: Fourier transforms of cut tensors."""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from oracle import Cut, assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from shardfield.distributed import fft as distributed_fft
from shardfield.distributed import fused_all_reduce
from shardfield.distributed.fft import work_elements
from shardfield.domain_parallel import ShardTensor
from test_convolution import peak_of
from torch import Tensor, fft
from torch.distributed.tensor import DTensor, Shard

import shardfield


def known_values(mesh) -> None:
    x = sharded(torch.arange(1.0, 6, dtype=torch.float64), mesh, 0)
    want = torch.tensor(
        [15, -2.5 + 3.440955j, -2.5 + 0.812299j, -2.5 - 0.812299j, -2.5 - 3.440955j]
    ).to(torch.complex128)
    assert_equal(full(fft.fft(x)), want, "fft", atol=1e-6)
    assert_equal(full(fft.rfft(x)), want[:3], "rfft", atol=1e-6)
    grid = sharded(torch.arange(6.0, dtype=torch.float64).view(3, 2), mesh, 0)
    got = full(fft.fft2(grid))
    for place, value in (((0, 0), 15), ((1, 0), -6 + 3.4641016j), ((0, 1), -3)):
        assert abs(got[place].item() - value) < 1e-6


def test_i1_known_values(run_mesh):
    run_mesh((3,), known_values)


def modulus(z: Tensor) -> Tensor:
    return z.real**2 + z.imag**2


def every_form(mesh) -> None:
    for norm in ("forward", "backward", "ortho"):
        for cut in range(3):
            for function in (
                lambda x, norm=norm: modulus(fft.fft(x, norm=norm)),
                lambda x, norm=norm: modulus(fft.rfft(x, dim=1, norm=norm)),
                lambda x, norm=norm: modulus(fft.fftn(x, norm=norm)),
                lambda x, norm=norm: modulus(fft.fftshift(fft.rfftn(x, dim=(0, 2), norm=norm))),
            ):
                check_same_as_serial(function, [Cut(numbers(5, 6, 7), [Shard(cut)])], mesh)


def test_i1_norms_shifts_and_dims(run_mesh):
    run_mesh((3,), every_form)


def large(mesh) -> None:
    n, world = 256, mesh.size()
    x = sharded(numbers(n, n).to(torch.complex128), mesh, 0)
    block = 16 * n * n // world
    fft.fft2(x)
    with shardfield.report() as report:
        _, peak = peak_of(lambda: fft.fft2(x))
    assert not report.fallbacks
    # One transpose: each block goes to its new owner but for the part that stays.
    assert report.bytes_sent == block * (world - 1) // world
    # PyTorch's own kernel for a dim that is not the last holds two blocks and its scratch.
    assert peak <= 3.25 * block


def test_i3_one_transpose_and_no_whole_array(run_mesh):
    run_mesh((4,), large)


def test_i5_sizes_beyond_32_bits_are_planned_without_memory():
    assert work_elements((2048, 1024, 1024), {}) == 2147483648
    assert work_elements((2048, 1024, 1024), {0: 1}) == 2147483648
    assert work_elements((2048, 1024, 1024), {0: 4}) == 2147483648 // 4
    assert work_elements((1 << 20, 1 << 20), {0: 1 << 10}) == 1 << 30
    assert work_elements((9, 8, 8), {0: 4}) == 192  # 3 x 8 x 8 before, 9 x 2 x 8 after
    assert work_elements((7,), {0: 2}) == 7  # nowhere to go
    assert work_elements((7, 5), {0: 2}, dim=[1]) == 21  # as it is, or 7 x 3
    assert work_elements((5, 2), {-2: 3}) == 10
    for wrong in (({3: 2}, None), ({0: 0}, None), ({0: 2}, [5])):
        with pytest.raises(ValueError, match="expected dims in"):
            work_elements((4, 4), *wrong)


def within_the_plan(mesh) -> None:
    """Neither the result nor a transform half-way holds more than was planned."""
    n = mesh.size(0)
    for shape in ((9, 7, 5), (4, 6, 8), (3, 11), (8, 1, 5)):
        for places in itertools.permutations(range(len(shape)), mesh.ndim):
            placed = [Shard(d) for d in places]
            x = shardfield.domain_parallel.shard_tensor(numbers(*shape), mesh, placed)
            for dims in ([0], [1], list(range(len(shape)))):
                most = work_elements(shape, dict.fromkeys(places, n), dims)
                got = fft.fftn(x, dim=dims)
                for value in (x, got, fft.ifftn(got, dim=dims)):
                    held = value.to_local() if is_sharded(value) else value
                    assert held.numel() <= most, (shape, places, dims, held.shape, most)


@pytest.mark.parametrize("size", [(1,), (3,), (4,), (2, 2)], ids=str)
def test_i5_no_rank_holds_more_than_planned(run_mesh, size):
    run_mesh(size, within_the_plan)


def defaults(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def twins(mesh) -> None:
    """Whoever leaves an option out gets what torch's function of that name does."""
    x = sharded(numbers(4, 3), mesh, 0)
    pairs = [
        (ShardTensor.from_local, DTensor.from_local, {"device_mesh", "placements"}),
        (x.to_local, DTensor.to_local, {"grad_placements"}),
        (x.full_tensor, DTensor.full_tensor, {"grad_placements"}),
        (x.redistribute, DTensor.redistribute, {"device_mesh", "placements", "async_op"}),
        (fused_all_reduce, dist.all_reduce, {"op", "group", "async_op"}),
    ]
    for ours, theirs, shared in pairs:
        a, b = defaults(ours), defaults(theirs)
        both = {n for n in inspect.signature(ours).parameters if n in b}
        assert shared <= both, (ours, both)
        for name in both:
            assert a[name] == b[name], (ours, name)
    for name in distributed_fft.__all__:
        if name != "work_elements":
            assert getattr(distributed_fft, name) is getattr(fft, name), name


def test_i9_defaults_are_those_of_torch(run_mesh):
    run_mesh((2,), twins)


def half_spectrum(mesh) -> None:
    x = sharded(torch.arange(8.0, dtype=torch.float64), mesh, 0).detach().requires_grad_()
    modulus(fft.rfft(x)).sum().backward()
    assert is_sharded(x.grad)
    want = torch.tensor([24.0, 40, 40, 56, 56, 72, 72, 88], dtype=torch.float64)
    assert_equal(full(x.grad), want, "gradient", atol=1e-10)
    odd = torch.arange(1.0, 6, dtype=torch.float64)
    modes = fft.rfft(sharded(odd, mesh, 0))
    assert_equal(full(fft.irfft(modes, n=5)), odd, "odd length", atol=1e-12)
    assert fft.irfft(modes).shape == (4,)


@pytest.mark.parametrize("world", [2, 3])
def test_i7_weights_of_the_half_spectrum(run_mesh, world):
    run_mesh((world,), half_spectrum)


def there_and_back(mesh) -> None:
    placed = [Shard(0)] if mesh.ndim == 1 else [Shard(0), Shard(1)]
    for sample in ((8, 8, 8), (9, 7, 5)):
        x = numbers(*sample)
        cut = shardfield.domain_parallel.shard_tensor(x, mesh, placed)
        assert_equal(full(fft.ifftn(fft.fftn(cut))), x.to(torch.complex128), "c2c", atol=1e-12)
        assert_equal(full(fft.irfftn(fft.rfftn(cut), s=sample)), x, "r2c", atol=1e-12)
        assert math.isclose(full(fft.rfftn(cut))[0, 0, 0].real, x.sum(), abs_tol=1e-10)


@pytest.mark.parametrize("size", [(4,), (2, 2), (1, 4), (4, 1)], ids=str)
def test_i11_slabs_and_pencils(run_mesh, size):
    run_mesh(size, there_and_back)
