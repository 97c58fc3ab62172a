"""Fourier transforms along cut dims: serial values and derivatives, no gather, least bytes."""

from __future__ import annotations

import pytest
import torch
from oracle import Cut, check_same_as_serial, is_sharded, numbers, scatter, sharded
from torch import Tensor, fft
from torch.distributed.tensor import Shard

import shardfield


def size_of(z: Tensor) -> Tensor:
    return (z * z.conj()).real


TRANSFORMS = {
    "fft2": lambda x: size_of(fft.fft2(x)),
    "fft_last": lambda x: size_of(fft.fft(x)),
    "fft_other": lambda x: size_of(fft.fft(x, dim=-2, norm="ortho")),
    "ifft2": lambda x: size_of(fft.ifft2(x)),
    "fftn_order": lambda x: size_of(fft.fftn(x, dim=(-1, -2), norm="forward")),
    "rfft2": lambda x: size_of(fft.rfft2(x)),
    "rfft_rows": lambda x: size_of(fft.rfft(x, dim=-2)),
    "round_trip": lambda x: fft.irfft2(fft.rfft2(x) * 1j, s=x.shape[-2:], norm="backward"),
    "round_trip_complex": lambda x: fft.ifft2(fft.fft2(x) ** 2).real,
    "longer": lambda x: fft.irfft2(fft.rfft2(x), s=(18, 11)),
    "hfft": lambda x: fft.hfft(x, dim=-2),
    "ihfft": lambda x: size_of(fft.ihfft(x, dim=-2)),
    "shift": lambda x: fft.fftshift(fft.fft2(x)).abs(),
    "low_pass": lambda x: fft.irfft2(fft.rfft2(x)[..., :5, :4], s=x.shape[-2:]),
}


def one_field(mesh, sample: tuple[int, ...]) -> None:
    """Nothing but the transformed dims may take the cut."""
    first = len(sample) - 2
    cuts = [[Shard(first)], [Shard(first + 1)]]
    if mesh.ndim == 2:
        cuts = [[Shard(first), Shard(first + 1)], [Shard(first + 1), Shard(first)]]
    for placed in cuts:
        for name, f in TRANSFORMS.items():
            try:
                check_same_as_serial(f, [numbers(*sample)], mesh, placed, output_sharded=True)
            except AssertionError as fault:
                raise AssertionError(f"{name} of {sample} under {placed}") from fault


@pytest.mark.parametrize("sample", [(1, 1, 16, 12), (13, 9), (2, 3, 10, 7)], ids=str)
def test_transforms_of_one_field(run_mesh, mesh_shape, sample):
    run_mesh(mesh_shape, one_field, sample=sample)


def volumes(mesh) -> None:
    """Three transformed dims; a slab or pencils of one sample."""
    placed = [Shard(0)] if mesh.ndim == 1 else [Shard(0), Shard(1)]
    for f in (
        lambda x: size_of(fft.fftn(x)),
        lambda x: fft.irfftn(fft.rfftn(x) * 2, s=x.shape),
        lambda x: size_of(fft.rfftn(x, dim=(2, 0))),
    ):
        check_same_as_serial(f, [numbers(6, 7, 5)], mesh, placed, output_sharded=True)
        uneven = Cut(numbers(6, 7, 5), placed, {0: [6] + [0] * (mesh.size(0) - 1)})
        check_same_as_serial(f, [uneven], mesh)


def test_volumes(run_mesh, mesh_shape):
    run_mesh(mesh_shape, volumes)


def bytes_of_a_round_trip(mesh) -> int:
    x = sharded(numbers(1, 1, 16, 12), mesh, 2)
    with shardfield.report() as report:
        modes = fft.rfft2(x)
        back = fft.irfft2(modes, s=(16, 12))
    assert is_sharded(modes) and modes.placements == (Shard(3),)
    assert back.placements == x.placements and not report.fallbacks
    return report.bytes_sent


@pytest.mark.parametrize("size", [2, 4])
def test_one_exchange_each_way(run_mesh, size):
    """The half spectrum moves once there and once back."""
    sent = sum(run_mesh((size,), bytes_of_a_round_trip))
    half_spectrum = 16 * 7 * 16  # complex elements of 16 bytes
    assert sent == 2 * half_spectrum * (size - 1) // size


def channels_by_frequency(mesh) -> None:
    """A Fourier layer's product of channels needs no further exchange."""
    x = scatter(Cut(numbers(1, 4, 16, 12), [Shard(2)]), mesh)
    weight = torch.view_as_complex(numbers(4, 4, 16, 7, 2))
    with shardfield.report() as report:
        modes = fft.rfft2(x)
        before = report.bytes_sent
        torch.einsum("bixy,ioxy->boxy", modes, weight)
        assert report.bytes_sent == before


def test_channels_by_frequency(run_mesh):
    run_mesh((2,), channels_by_frequency)
