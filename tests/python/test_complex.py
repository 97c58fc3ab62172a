"""Complex tensors: conjugates, spectral layers with complex weights, gradients by PyTorch's rule."""

from __future__ import annotations

import copy

import pytest
import torch
from many_cases import check_cases
from oracle import Cut, assert_equal, check_same_as_serial, full, numbers, scatter, sharded
from torch import Tensor
from torch.distributed.tensor import Shard

import shardfield


def complex_of(x: Tensor) -> Tensor:
    return torch.complex(x, x.flip(0) + 0.5)


CASES = {
    "product": lambda x: torch.view_as_real(complex_of(x) * complex_of(x * 2).exp()),
    "conjugate": lambda x: torch.view_as_real(complex_of(x) * complex_of(x).conj()),
    "abs": lambda x: complex_of(x).abs(),
    "polar": lambda x: torch.polar(x.abs() + 0.1, x).real,
    "real_imag": lambda x: complex_of(x).square().real + complex_of(x).sin().imag,
    "sum": lambda x: (complex_of(x).sum(0) * 1j).abs(),
    "mean": lambda x: complex_of(x).mean((1, 2)).angle(),
    "norm": lambda x: torch.linalg.vector_norm(complex_of(x), dim=1),
    "matmul": lambda x: (complex_of(x) @ complex_of(x).mH).imag,
    "einsum": lambda x: torch.einsum("abc,abd->cd", complex_of(x), complex_of(x).conj()).real,
    "divide": lambda x: (1 / complex_of(x + 3)).real,
    "view_as_complex": lambda x: torch.view_as_complex(torch.stack([x, x * x], -1)).abs(),
    "spectrum": lambda x: torch.fft.fft(x, dim=1).abs(),
    "filter": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=2) * 1j, n=x.size(2), dim=2),
    "cumsum": lambda x: complex_of(x).cumsum(1).imag,
}


def cases(mesh) -> None:
    check_cases(mesh, CASES, numbers(4, 6, 5), (0, 1, 2))


def test_same_as_serial(run_mesh, mesh_shape):
    run_mesh(mesh_shape, cases)


MODES = 3


class SpectralLayer(torch.nn.Module):
    """A Fourier layer as operator networks write it: low modes times complex weights."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shape = (channels, channels, MODES, MODES)
        self.weight = torch.nn.Parameter(
            torch.randn(shape, dtype=torch.complex128, generator=generator) / channels
        )
        self.skip = torch.nn.Conv2d(channels, channels, 1, dtype=torch.float64)
        with torch.no_grad():
            self.skip.weight.copy_(numbers(channels, channels, 1, 1, seed=7))
            self.skip.bias.copy_(numbers(channels, seed=8))

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", modes[:, :, :MODES, :MODES], self.weight)
        out = torch.zeros_like(modes)
        out[:, :, :MODES, :MODES] = low
        return torch.nn.functional.gelu(torch.fft.irfft2(out, s=x.shape[-2:]) + self.skip(x))


def fourier_network(mesh) -> None:
    net = torch.nn.Sequential(SpectralLayer(4), SpectralLayer(4))
    dims = [(2, 3), (3, 2)] if mesh.ndim == 2 else [(2,), (3,), (1,), (0,)]
    for cut_dims in dims:
        x = Cut(numbers(2, 4, 9, 11), [Shard(d) for d in cut_dims], {})
        check_same_as_serial(copy.deepcopy(net), [x], mesh, no_fallback=mesh.ndim == 1)


def test_a_fourier_network(run_mesh, mesh_shape):
    run_mesh(mesh_shape, fourier_network)


def views(mesh) -> None:
    x = complex_of(numbers(6, 4))
    s = scatter(Cut(x, [Shard(0)] * mesh.ndim, {}), mesh)
    for op in (torch.conj, torch.adjoint, torch.resolve_conj, torch.real, torch.imag):
        assert_equal(full(op(s)), op(x), op.__name__)
    assert_equal(full(s.conj().imag), x.conj().imag, "imag of conj")
    assert_equal(full(torch.complex(s.real, s.imag)), x, "parts")
    with pytest.raises(RuntimeError, match="cannot write in place"):
        s.conj().mul_(2)
    y = sharded(x.clone(), mesh, 0)
    y.real.mul_(2)
    z = x.clone()
    z.real.mul_(2)
    assert_equal(full(y), z, "a write to the real part")


def test_views(run_mesh, mesh_shape):
    run_mesh(mesh_shape, views)


def quiet(mesh) -> dict[str, int]:
    x = sharded(numbers(4, 6, 5), mesh, 1)
    with shardfield.report() as report:
        for name in ("product", "conjugate", "polar", "einsum", "spectrum"):
            CASES[name](x)
    return dict(report.fallbacks)


def test_nothing_is_gathered(run_mesh):
    assert run_mesh((3,), quiet) == [{}] * 3
