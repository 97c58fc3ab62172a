"""CASES, kind I: Fourier transforms of cut tensors."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Cut, assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from test_convolution import peak_of
from torch import Tensor, fft
from torch.distributed.tensor import Shard

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
