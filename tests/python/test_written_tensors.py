"""`plain[...] = sharded`: an ordinary tensor that only the caller sees becomes sharded; no gather."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from drawing import Drawn, base_seed, check_draws, values
from oracle import assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
from torch import Tensor
from torch.distributed.tensor import Shard

import shardfield


def zeros(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def every_step(x: Tensor) -> Tensor:
    """A solver's history, as torchdiffeq fills it."""
    history = torch.empty(4, *x.shape, dtype=x.dtype)
    history[0] = x
    for step in range(1, 4):
        x = x.sin() * 2
        history[step] = x
    return history


def low_modes(x: Tensor) -> Tensor:
    """A Fourier layer: a product of channels for the low modes of both signs."""
    modes = torch.fft.rfft2(x)
    weight = numbers(3, 3, 3, 4, seed=5)
    out = zeros(*modes.shape, dtype=torch.complex128)
    out[:, :, :3, :4] = torch.einsum("bixy,ioxy->boxy", modes[:, :, :3, :4], weight + 0j)
    out[:, :, -3:, :4] = torch.einsum("bixy,ioxy->boxy", modes[:, :, -3:, :4], weight * 1j)
    return torch.fft.irfft2(out, s=x.shape[-2:])


def sums(x: Tensor) -> Tensor:
    total = zeros(*x.shape)
    for k in range(3):
        total += x**k
    total -= x.flip(3)
    total *= x
    return total


def items(x: Tensor) -> Tensor:
    """`out[k] += y` reads a view, adds to it and writes it back."""
    total = zeros(4, 6, 2, 3, 12, 10)
    for k in range(3):
        total[1, k] += x * k
        total[:, 1::2, ..., :] -= x
    total[3, 5, :, None] *= x.flip(2).unsqueeze(1)
    return total


FILLED = {
    "every_step": every_step,
    "low_modes": low_modes,
    "sums": sums,
    "items": items,
    "item": lambda x: add_item(zeros(4, *x.shape), x),
    "whole": lambda x: put(zeros(*x.shape), slice(None), x * 2),
    "dots": lambda x: put(zeros(*x.shape, 2), (..., 1), x * 2),
    "new_dim": lambda x: put(zeros(5, *x.shape), (slice(1, 4), None), x.unsqueeze(0)),
    "part": lambda x: put(torch.ones(2, 3, 20, 24, dtype=x.dtype), np.s_[:, :, 5:17, 3:13], x),
    "every_other": lambda x: put(zeros(2, 3, 24, 10), np.s_[:, :, ::2], x),
    "broadcast": lambda x: put(zeros(6, *x.shape), slice(None), x),
    "lower_type": lambda x: put(zeros(*x.shape), slice(None), x.float()),
    "numpy_number": lambda x: put(zeros(4, *x.shape), np.int64(2), x),
}


def add_item(out: Tensor, value: Tensor) -> Tensor:
    row = out[2]
    row += value
    return out * 3 + row


def put(out: Tensor, index, value: Tensor) -> Tensor:
    out[index] = value
    return out * 3


def filled(mesh) -> None:
    for dims in (0, 2, 3) if mesh.ndim == 1 else ((2, 3), (0, 2)):
        cuts = [Shard(d) for d in ((dims,) if isinstance(dims, int) else dims)]
        for name, function in FILLED.items():
            with shardfield.report() as report:
                try:
                    check_same_as_serial(
                        function, [numbers(2, 3, 12, 10)], mesh, cuts, output_sharded=True
                    )
                except AssertionError as fault:
                    raise AssertionError(f"{name}, cut along {dims}") from fault
            assert not report.fallbacks, (name, dims, report.fallbacks)


def test_same_as_serial_and_no_gather(run_mesh, mesh_shape):
    run_mesh(mesh_shape, filled)


def without_records(mesh) -> None:
    x = sharded(numbers(7, 5), mesh, 0)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context, shardfield.report() as report:
            out = zeros(3, 7, 5)
            same = out
            out[1] = x
            assert is_sharded(out)
            assert same is out
            want = zeros(3, 7, 5)
            want[1] = numbers(7, 5)
            assert_equal(full(out), want, "history")
        assert not report.fallbacks


def test_without_recording(run_mesh):
    run_mesh((2,), without_records)


def still_seen(mesh) -> None:
    """Whoever else looks at the memory must see the write, so these gather."""
    value = numbers(7, 5)
    x = sharded(value, mesh, 0)

    def check(out: Tensor, seen, index=slice(None)) -> None:
        with shardfield.report() as report:
            out[index] = x
        assert report.fallbacks
        assert not is_sharded(out)
        np.testing.assert_array_equal(np.asarray(seen), value.numpy())

    base = zeros(2, 7, 5)
    row = base[1]
    check(base, row, 1)
    check(row, base[1])
    out = zeros(7, 5)
    check(out, out.numpy())
    array = np.zeros((7, 5))
    check(torch.from_numpy(array), array)
    out = zeros(7, 5)
    check(out, out.detach())
    out = zeros(7, 5)
    check(out, torch.utils.dlpack.from_dlpack(out))
    out = zeros(7, 5)
    weight = zeros(7, 5).requires_grad_()
    saved = weight * out
    check(out, out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.sum().backward()


def test_a_tensor_that_others_see_stays_plain(run_mesh):
    run_mesh((2,), still_seen)


class Queue(torch.nn.Module):
    """Remembers what it was called with, as contrastive models do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("rows", zeros(6, 4))
        self.register_buffer("total", zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        self.rows[1:4] = x
        self.total += x
        self.total[:] += x
        return self.rows * 2


def module_state(mesh) -> None:
    """A module's buffers are saved and loaded whole, so they stay plain."""
    net = Queue()
    assert_equal(net(sharded(numbers(3, 4), mesh, 0)), net(numbers(3, 4)), "output")
    assert not any(is_sharded(b) for b in net.state_dict().values())
    assert_equal(net.total, numbers(3, 4) * 4, "total")


def test_buffers_of_modules_stay_plain(run_mesh):
    run_mesh((2,), module_state)


def one_rank_sees(mesh) -> None:
    """Ranks that differ decide alike."""
    x = sharded(numbers(6, 4), mesh, 0)
    out = zeros(6, 4)
    view = out[0] if mesh.get_rank() == 0 else None
    out[:] = x
    assert not is_sharded(out)
    assert_equal(out, numbers(6, 4), "out")
    assert view is None or torch.equal(view, numbers(6, 4)[0])


def test_all_ranks_decide_alike(run_mesh):
    run_mesh((3,), one_rank_sees)


def by_lists(mesh) -> None:
    """Masks and lists of rows have no single window: gathered as before, and right."""
    x, rows = sharded(numbers(3, 5), mesh, 0), torch.tensor([4, 0, 2])
    out, want = zeros(6, 5), zeros(6, 5)
    out[rows] = x
    want[rows] = numbers(3, 5)
    assert_equal(full(out), want, "rows")
    mask = torch.arange(6) % 2 == 0
    out, want = zeros(6, 5), zeros(6, 5)
    out[mask] = x
    want[mask] = numbers(3, 5)
    assert_equal(full(out), want, "mask")


def test_masks_and_lists(run_mesh):
    run_mesh((2,), by_lists)


def plain_work(_mesh) -> None:
    """Writes among plain tensors and into leaves behave as in PyTorch."""
    out = zeros(3, 4)
    out[1, ::2] = 5
    out[..., 3] = torch.arange(3.0)
    out += 1
    want = torch.tensor([[1, 1, 1, 1], [6, 1, 6, 2], [1, 1, 1, 3]], dtype=torch.float64)
    assert torch.equal(out, want)
    leaf = zeros(3).requires_grad_()
    with pytest.raises(RuntimeError, match="leaf"):
        leaf[0] = 1


def test_plain_tensors(run_mesh):
    run_mesh((1,), plain_work)


def draw_index(rng: random.Random, shape: tuple[int, ...]) -> tuple:
    """Numbers, ranges with steps, new dims and dots, as users write them."""
    index: list = []
    for n in shape:
        begin = rng.randrange(n)
        part = slice(begin, rng.randint(begin + 1, n), rng.choice([1, 1, 2, 3]))
        index.append(rng.choice([rng.randrange(-n, n), part, part, slice(None)]))
    if rng.random() < 0.3:
        index.insert(rng.randint(0, len(index)), None)
    if rng.random() < 0.3:
        index.insert(rng.randint(0, len(index)), ...)
    elif rng.random() < 0.3:
        index = index[: rng.randint(1, len(index))]
    return tuple(index)


def write(out: Tensor, index: tuple, value: Tensor, way: str) -> Tensor:
    if way == "put":
        out[index] = value
    elif way == "add":
        out[index] += value
    else:
        row = out[index]
        row *= value
        out[index] = row + 1
    return out * 2


def draw_write(rng: random.Random) -> Drawn:
    cuttable: list[int] = []
    while not cuttable:
        shape = tuple(rng.choice([1, 2, 3, 5, 8]) for _ in range(rng.randint(1, 4)))
        index = draw_index(rng, shape)
        taken = zeros(*shape)[index].shape
        cuttable = [d for d, n in enumerate(taken) if n > 1]
    way = rng.choice(["put", "add", "row"])
    return Drawn(
        f"{way} into {shape} at {index}",
        lambda x: write(torch.ones(shape, dtype=x.dtype), index, x, way),
        values(rng, *taken),
        cuttable,
    )


def drawn_writes(mesh, seeds: list[int]) -> None:
    check_draws(mesh, draw_write, seeds)


def test_drawn_indices(run_mesh, mesh_shape):
    seeds = list(range(base_seed(), base_seed() + 40))
    print(f"seeds {seeds[0]} to {seeds[-1]}; repeat one with SHARDFIELD_SEED")
    run_mesh(mesh_shape, drawn_writes, seeds=seeds, limit_s=120)
