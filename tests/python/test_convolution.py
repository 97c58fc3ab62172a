"""Convolution: bytes on the wire, peak memory, cut channels, dtypes and memory formats.

Values against the serial op for random numbers are in test_properties_windows.py, the published
cases in test_cases_d_windows.py and test_cases_e_halo.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import oracle
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import Cut, full, is_sharded, numbers, scatter, sharded
from shardfield.domain_parallel import shard_tensor
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.profiler import ProfilerActivity, profile

import shardfield

IN, OUT, WIDTH = 6, 4, 5
# name, transposed, kernel, stride, padding, dilation, output padding
LAYERS = {
    "k3s1": (False, 3, 1, 1, 1, 0),
    "k3s2": (False, 3, 2, 1, 1, 0),
    "k4s2": (False, 4, 2, 1, 1, 0),
    "k7s2": (False, 7, 2, 3, 1, 0),
    "k3 dilated": (False, 3, 1, 2, 2, 0),
    "k2s2": (False, 2, 2, 0, 1, 0),
    "k3 valid": (False, 3, 1, 0, 1, 0),
    "transposed k2s2": (True, 2, 2, 0, 1, 0),
    "transposed k4s2": (True, 4, 2, 1, 1, 0),
    "transposed k3s2": (True, 3, 2, 1, 1, 1),
}
PIECES = {"even": (8, 8, 8, 8), "odd": (9, 9, 9, 9), "uneven": (9, 8, 12, 7)}


def convolve(x: Tensor, w: Tensor, b: Tensor | None, layer: Sequence[Any]) -> Tensor:
    """The layer along rows; a kernel of 1 along columns."""
    transposed, _, s, p, d, extra = layer
    if transposed:
        return F.conv_transpose2d(x, w, b, (s, 1), (p, 0), (extra, 0), 1, (d, 1))
    return F.conv2d(x, w, b, (s, 1), (p, 0), (d, 1))


def weight_of(layer: Sequence[Any], dtype: torch.dtype = torch.float64) -> Tensor:
    shape = (IN, OUT, layer[1], 1) if layer[0] else (OUT, IN, layer[1], 1)
    return numbers(*shape, seed=1, dtype=dtype).requires_grad_()


def sent_by_all(report: Any) -> int:
    """Bytes that all ranks sent."""
    total = torch.tensor(report.bytes_sent)
    dist.all_reduce(total)
    return int(total)


def least_rows(layer: Sequence[Any], border: int, output_border: int) -> tuple[int, int]:
    """Rows that must cross one inner border: of the input, and of the output's gradient instead.

    LIMITS 3.1 counts (extent - stride) rows at a border that falls on the output grid. Where it
    does not, an output that reads rows of both sides costs a row more, wherever it is put.
    """
    transposed, k, s, p, d, _ = layer
    extent = d * (k - 1) + 1
    if transposed:  # every input that reaches outputs of both sides; fine rows of the gradient
        return (extent - 1) // s, max(extent - s, 0)
    rows = min(
        max(border - (o * s - p), 0) + max((o - 1) * s - p + extent - border, 0)
        for o in range(output_border - 2, output_border + 3)
    )
    straddling = sum(
        o * s - p < border < o * s - p + extent for o in range(border // s + 2 * extent)
    )
    return rows, straddling


def least_bytes(layer: Sequence[Any], pieces: Sequence[int], outputs: Sequence[int]):
    """Bytes in float64 over all borders: forward, and backward without the weights."""
    forward = backward = 0
    for i in range(1, len(pieces)):
        inputs, grads = least_rows(layer, sum(pieces[:i]), sum(outputs[:i]))
        forward += inputs * IN * WIDTH * 8
        backward += grads * OUT * WIDTH * 8
    return forward, min(forward, backward)


def count_bytes(mesh: Any, layer: Sequence[Any], rows: Sequence[int]) -> None:
    ranks = mesh.size()
    x = sharded(numbers(1, IN, sum(rows), WIDTH), mesh, 2, list(rows)).requires_grad_()
    w = weight_of(layer)
    with shardfield.report() as report:
        y = convolve(x, w, None, layer)
    outputs = [0] * ranks
    dist.all_gather_object(outputs, y.to_local().size(2))
    forward, backward = least_bytes(layer, rows, outputs)
    assert not report.fallbacks
    assert sent_by_all(report) == forward
    if not layer[0] and all(sum(rows[:i]) % layer[2] == 0 for i in range(ranks)):
        extent = layer[4] * (layer[1] - 1) + 1  # the formula of LIMITS 3.1, word for word
        assert forward == max(extent - layer[2], 0) * IN * WIDTH * 8 * (ranks - 1)
    serial = convolve(full(x.detach()), w.detach(), None, layer)
    oracle.assert_equal(y, serial, "output")
    with shardfield.report() as report:
        y.backward(shard_like(y))
    weights = ranks * (2 * (ranks - 1) * w.numel() * 8 // ranks)
    assert sent_by_all(report) - weights <= backward
    with shardfield.report() as report:  # no gradient of the input: nothing but the weights'
        y = convolve(x.detach(), w, None, layer)
        y.backward(shard_like(y))
    assert sent_by_all(report) - weights <= forward


def shard_like(y: Tensor) -> Tensor:
    """A gradient cut as y is, so that none of its rows travel for that."""
    return y.detach() * 2


@pytest.mark.parametrize("pieces", PIECES)
@pytest.mark.parametrize("layer", LAYERS)
def test_bytes_are_the_least_possible(run_mesh, layer, pieces):
    run_mesh((4,), count_bytes, layer=LAYERS[layer], rows=PIECES[pieces])


def peak_of(work: Any) -> tuple[Any, int]:
    """The result, and the largest sum of live bytes allocated while it was made."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = work()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profiler.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    live = peak = 0
    for _, change in changes:
        live += change
        peak = max(peak, live)
    return result, peak


def measure_memory(mesh: Any, layer: Sequence[Any]) -> None:
    ranks, rows, width = mesh.size(), 64, 96
    x = numbers(1, IN, rows * ranks, width, dtype=torch.float32)
    w = weight_of(layer, torch.float32)

    def both(x: Tensor) -> tuple[int, int]:
        convolve(x, w, None, layer).sum().backward()  # plans, thread pools
        y, forward = peak_of(lambda: convolve(x, w, None, layer))
        grad = y.detach() * 2
        _, backward = peak_of(lambda: y.backward(grad))
        return forward, backward

    serial = both(x.clone().requires_grad_())
    mine = both(shard_tensor(x, mesh, [Shard(2)]).requires_grad_())
    _, k, s, _, d, _ = layer
    # Received and sent rows, and the slabs made of them, input and output.
    reach = d * (k - 1) + s
    halo = 2 * 3 * reach * width * 4 * (IN + OUT)
    slack = 16384
    for name, here, there in zip(("forward", "backward"), mine, serial, strict=True):
        limit = 1.05 * (there / ranks + halo) + slack
        assert here <= limit, f"{name}: {here} bytes, serial {there}, limit {limit:.0f}"


@pytest.mark.parametrize("layer", ["k3s1", "k3s2", "k4s2", "transposed k2s2", "k3 valid"])
def test_peak_memory(run_mesh, layer):
    run_mesh((2,), measure_memory, layer=LAYERS[layer])


def cut_channels(mesh: Any, groups: int, transposed: bool) -> None:
    x = numbers(2, 4, 6, 5)
    shape = (4, 3, 3, 3) if transposed else (8, 4 // groups, 3, 3)
    w, b = numbers(*shape, seed=1), numbers(3 * groups if transposed else 8, seed=2)

    def op(t: Tensor, w: Tensor, b: Tensor) -> Tensor:
        if transposed:
            return F.conv_transpose2d(t, w, b, 2, 1, 1, groups)
        return F.conv2d(t, w, b, 1, 1, 1, groups)

    placements = [Replicate()] * (mesh.ndim - 1) + [Shard(1)]
    mine = [shard_tensor(x, mesh, placements), w.clone(), b.clone()]
    plain = [x.clone(), w.clone(), b.clone()]
    for tensors in (mine, plain):
        for t in tensors:
            t.requires_grad_()
    with shardfield.report() as report:
        y = op(*mine)
        grads = torch.autograd.grad((y * y).sum(), mine, create_graph=True)
        twice = torch.autograd.grad(sum((g * g).sum() for g in grads), mine)
    assert not report.fallbacks
    z = op(*plain)
    expected = torch.autograd.grad((z * z).sum(), plain, create_graph=True)
    oracle.assert_equal(y, z, "output")
    for got, want in zip(grads, expected, strict=True):
        oracle.assert_equal(got, want, "gradient")
    for got, want in zip(
        twice, torch.autograd.grad(sum((g * g).sum() for g in expected), plain), strict=True
    ):
        oracle.assert_equal(got, want, "second gradient")
    assert is_sharded(grads[0])
    assert is_sharded(y) == (groups == 4 and mesh.size(mesh.ndim - 1) in (1, 2, 4))


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_D17_cut_channels(run_mesh, groups, transposed):
    for shape in ((2,), (4,)):
        if groups == 2 and shape == (2,):
            continue  # whole groups on each rank: covered by 4
        run_mesh(shape, cut_channels, groups=groups, transposed=transposed)


def dtypes_and_formats(mesh: Any) -> None:
    x, w = numbers(2, 4, 9, 8), numbers(3, 4, 3, 3, seed=1)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype == torch.bfloat16):
            y = F.conv2d(sharded(x.float(), mesh, 2), w.float(), padding=1)
            z = F.conv2d(x.float(), w.float(), padding=1)
        oracle.assert_equal(y, z, str(dtype), rtol=1e-2, atol=5e-2)
        assert y.stride() == z.stride(), f"{dtype}: strides {y.stride()}, serial {z.stride()}"
    last = x.float().contiguous(memory_format=torch.channels_last)
    cut = sharded(x.float(), mesh, 2).contiguous(memory_format=torch.channels_last)
    y, z = F.conv2d(cut, w.float()), F.conv2d(last, w.float())
    assert y.stride() == z.stride()
    oracle.assert_equal(y, z, "channels last", rtol=1e-5, atol=1e-5)
    with torch.inference_mode():
        y = F.conv2d(sharded(x, mesh, 2), w, padding=1)
        oracle.assert_equal(y, F.conv2d(x, w, padding=1), "inference mode")


def test_dtypes_and_formats(run_mesh):
    run_mesh((2,), dtypes_and_formats)


def derivative_op(mesh: Any) -> None:
    x, w, g = numbers(2, 4, 9, 8), numbers(3, 4, 3, 3, seed=1), numbers(2, 3, 9, 8, seed=2)
    args = ([3], (1, 1), (1, 1), (1, 1), False, (0, 0), 1, [True, True, True])
    want = torch.ops.aten.convolution_backward(g, x, w, *args)
    got = torch.ops.aten.convolution_backward(sharded(g, mesh, 2), sharded(x, mesh, 2), w, *args)
    for a, b in zip(got, want, strict=True):
        oracle.assert_equal(a, b, "convolution_backward")


def test_the_derivative_op_itself(run_mesh):
    run_mesh((3,), derivative_op)


def refusals(mesh: Any) -> None:
    x = sharded(numbers(1, 4, 9, 8), mesh, 2)
    with pytest.raises(RuntimeError, match=r"expected 3 input channels .* got input .* on rank"):
        F.conv2d(x, numbers(2, 3, 3, 3))
    with pytest.raises(RuntimeError, match="kernel size can't be greater"):
        F.conv2d(x, numbers(2, 4, 10, 3))
    with pytest.raises(RuntimeError, match="not supported for strided"):
        F.conv2d(x, numbers(2, 4, 3, 3), stride=2, padding="same")


def test_refusals(run_mesh):
    run_mesh((2,), refusals)


def two_cuts(mesh: Any, sizes: dict[int, Sequence[int]]) -> None:
    """Corners, both ways of backward (few and many output channels), empty and thin pieces."""
    x = numbers(1, 3, 9, 8)
    for out in (1, 7):
        for kernel, stride, padding in ((3, 1, 1), (4, 2, 1), (5, 1, 2), (2, 1, 1)):
            w = numbers(out, 3, kernel, kernel, seed=out)
            oracle.check_same_as_serial(
                lambda t, w, s=stride, p=padding: F.conv2d(t, w, None, s, p),
                [Cut(x, [Shard(2), Shard(3)], sizes)],
                mesh,
                plain=[w],
            )
            if stride == 1:
                continue
            oracle.check_same_as_serial(
                lambda t, w, s=stride, p=padding: F.conv_transpose2d(t, w, None, s, p),
                [Cut(x, [Shard(2), Shard(3)], sizes)],
                mesh,
                plain=[w.transpose(0, 1).contiguous()],
            )


@pytest.mark.parametrize("sizes", [{}, {0: (9, 0), 1: (3, 5)}, {0: (8, 1), 1: (7, 1)}])
def test_E5_two_cut_dims(run_mesh, sizes):
    run_mesh((2, 2), two_cuts, sizes=sizes)


def big_gap(mesh: Any) -> None:
    x = scatter(Cut(numbers(1, 2, 7, 3), [Shard(2)], {0: (0, 5, 0, 2)}), mesh)
    w = numbers(2, 2, 2, 1, seed=1)
    y = F.conv2d(x, w, stride=(4, 1), padding=(1, 0))
    oracle.assert_equal(y, F.conv2d(full(x), w, stride=(4, 1), padding=(1, 0)), "gap")


def test_stride_beyond_the_kernel(run_mesh):
    run_mesh((4,), big_gap)


def merged_positions(mesh) -> None:
    """A layer over flattened positions, one dim of which is cut: rows move, nobody gets all."""
    from oracle import Cut, check_same_as_serial
    from torch.distributed.tensor import Shard

    for dim in (2, 3):
        for kernel in (1, 3):
            layer = torch.nn.Conv1d(3, 4, kernel, dtype=torch.float64)
            with torch.no_grad():
                layer.weight.copy_(numbers(4, 3, kernel, seed=1))
                layer.bias.copy_(numbers(4, seed=2))
            check_same_as_serial(
                torch.nn.Sequential(torch.nn.Flatten(2), layer),
                [Cut(numbers(2, 3, 5, 8), [Shard(dim)])],
                mesh,
                output_sharded=True,
            )


@pytest.mark.parametrize("size", [1, 2, 3])
def test_positions_of_a_merged_dim(run_mesh, size):
    run_mesh((size,), merged_positions)
