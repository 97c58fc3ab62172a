"""The oracle: a sharded computation must give what the plain one gives on one device, in float64.

Everything here runs on the ranks. `check_same_as_serial` compares output, first gradients, second
gradients and buffers by absolute values, and asserts the kinds the laws promise: the gradient of
a sharded tensor is sharded over the same pieces, the gradient of a plain tensor is plain.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from shardfield.domain_parallel import ShardTensor, shard_tensor
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

import shardfield

RTOL = 1e-9
ATOL = 1e-10


@dataclass
class Cut:
    """An input held in pieces: the full tensor, how it is placed, and its pieces if not even.

    `sizes[mesh_axis]` lists the length of each piece along that axis's tensor dim; an axis left out
    is cut as `torch.chunk` would.
    """

    full: Tensor
    placements: Sequence[Placement]
    sizes: dict[int, Sequence[int]] = field(default_factory=dict)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """The same normal random numbers on every rank."""
    return torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), dtype=dtype).to(
        torch.get_default_device()
    )


def arange(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """0, 1, 2, ... in this shape."""
    return torch.arange(math.prod(shape), dtype=dtype).reshape(shape)


def is_sharded(value: Any) -> bool:
    """True for sharded tensors only (DESIGN 4)."""
    return isinstance(value, ShardTensor)


def full(value: Tensor) -> Tensor:
    """The whole tensor, whichever kind it is."""
    return value.full_tensor() if is_sharded(value) else value


def chunk_sizes(length: int, parts: int) -> list[int]:
    """Piece lengths of `torch.chunk`'s rule, empty pieces at the end."""
    step = -(-length // parts) if length else 0
    return [max(0, min(step, length - i * step)) for i in range(parts)]


def piece_sizes(cut: Cut, mesh: DeviceMesh) -> dict[int, list[int]]:
    """Lengths of the pieces along each cutting mesh axis."""
    lengths: dict[int, list[int]] = {}
    for axis, placement in enumerate(cut.placements):
        if isinstance(placement, Shard):
            dim = placement.dim % cut.full.dim()
            lengths[axis] = list(
                cut.sizes.get(axis, chunk_sizes(cut.full.size(dim), mesh.size(axis)))
            )
    return lengths


def scatter(cut: Cut, mesh: DeviceMesh) -> Tensor:
    """The sharded form of an input: chunked, or with the caller's piece sizes."""
    if not cut.sizes:
        return shard_tensor(cut.full, mesh, list(cut.placements))
    lengths = piece_sizes(cut, mesh)
    here = mesh.get_coordinate()
    piece = cut.full
    for axis, sizes in lengths.items():
        dim = cut.placements[axis].dim
        piece = piece.narrow(dim, sum(sizes[: here[axis]]), sizes[here[axis]])
    shapes = {}
    for axis, sizes in lengths.items():
        dim = cut.placements[axis].dim % cut.full.dim()
        shapes[axis] = [torch.Size([*piece.shape[:dim], n, *piece.shape[dim + 1 :]]) for n in sizes]
    return ShardTensor.from_local(piece.clone(), mesh, list(cut.placements), sharding_shapes=shapes)


def sharded(
    value: Tensor, mesh: DeviceMesh, dim: int | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """`value` cut along `dim` by the mesh's last axis; the other axes hold it whole."""
    placements: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [
        Shard(0 if dim is None else dim)
    ]
    return scatter(Cut(value, placements, {mesh.ndim - 1: sizes} if sizes else {}), mesh)


def placements_of(mesh: DeviceMesh, *dims: int) -> list[Placement]:
    """`Shard(dim)` for each mesh axis in turn."""
    assert len(dims) == mesh.ndim
    return [Shard(dim) for dim in dims]


def assert_equal(
    actual: Tensor, expected: Tensor, what: str, rtol: float = RTOL, atol: float = ATOL
) -> None:
    """Absolute values, shape and dtype; the message names what differs and by how much."""
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what}: shape {tuple(actual.shape)}, serial {tuple(expected.shape)}"
    )
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, serial {expected.dtype}"
    whole = full(actual).detach()
    assert tuple(whole.shape) == tuple(expected.shape), (
        f"{what}: full_tensor() has shape {tuple(whole.shape)}, serial {tuple(expected.shape)}"
    )
    torch.testing.assert_close(
        whole,
        expected.detach(),
        rtol=rtol,
        atol=atol,
        equal_nan=True,
        msg=lambda text: f"{what}: {text}",
    )


def assert_relative(actual: Tensor, expected: Tensor, what: str, limit: float = 1e-8) -> None:
    """The largest difference, over the largest magnitude of the serial tensor."""
    assert tuple(actual.shape) == tuple(expected.shape), (
        f"{what}: shape {tuple(actual.shape)}, serial {tuple(expected.shape)}"
    )
    if expected.numel() == 0:
        return
    whole = full(actual).detach()
    scale = max(float(expected.abs().max()), 1e-12)
    error = float((whole - expected).abs().max()) / scale
    assert error <= limit, f"{what}: relative error {error:.3e} (largest magnitude {scale:.3e})"


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for v in value.values() for t in _tensors(v)]
    if isinstance(value, (list, tuple)):
        return [t for v in value for t in _tensors(v)]
    return []


def loss_of(outputs: Sequence[Tensor], seed: int) -> Tensor:
    """A scalar whose gradient differs everywhere and whose second gradient is not zero."""
    total = torch.zeros((), dtype=torch.float64)
    for i, out in enumerate(outputs):
        if out.is_floating_point() and (out.requires_grad or out.grad_fn is not None):
            weight = numbers(*out.shape, seed=seed + 1000 + i, dtype=out.dtype)
            total = total + (out * weight + 0.5 * out * out).sum()
    return total


@dataclass
class Run:
    """Everything one run of the function leaves behind, by name."""

    outputs: list[Tensor]
    leaves: dict[str, Tensor]
    buffers: dict[str, Tensor]
    first: dict[str, Tensor | None]
    second: dict[str, Tensor | None]


def _run(function: Any, arguments: Sequence[Any], seed: int, second: bool) -> Run:
    """Output, first gradients, and (by `backward`) the gradients of a gradient penalty."""
    is_module = isinstance(function, nn.Module)
    inputs = {
        f"input {i}": a
        for i, a in enumerate(arguments)
        if isinstance(a, Tensor) and a.requires_grad
    }
    leaves = {**inputs, **(dict(function.named_parameters()) if is_module else {})}
    outputs = _tensors(function(*arguments))
    loss = loss_of(outputs, seed)
    first: dict[str, Tensor | None] = {}
    twice: dict[str, Tensor | None] = {}
    if loss.requires_grad and not second:
        loss.backward()
        first = {name: leaf.grad for name, leaf in leaves.items()}
    elif loss.requires_grad:
        grads = torch.autograd.grad(
            loss, list(leaves.values()), create_graph=True, allow_unused=True
        )
        first = dict(zip(leaves, grads, strict=True))
        penalty = torch.zeros((), dtype=torch.float64)
        for name, grad in first.items():
            if grad is not None and name in inputs:
                penalty = penalty + (grad * grad).sum()
        if penalty.requires_grad:
            penalty.backward()
            twice = {name: leaf.grad for name, leaf in leaves.items()}
    return Run(outputs, leaves, dict(function.named_buffers()) if is_module else {}, first, twice)


def _whole(values: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    """Every tensor in full; all ranks gather before any of them compares."""
    return {name: None if value is None else full(value.detach()) for name, value in values.items()}


def _compare_gradients(
    kind: str, ours: Run, serial: Run, which: str, rtol: float, atol: float
) -> None:
    got_by_name, want_by_name = getattr(ours, which), getattr(serial, which)
    whole = _whole(got_by_name)
    for name, want in want_by_name.items():
        got = got_by_name.get(name)
        if want is None or got is None:  # an unused input may come back as zeros or as None
            other = whole.get(name) if want is None else want
            assert other is None or not other.any(), f"{kind} of {name}: one side is None"
            continue
        leaf = ours.leaves[name]
        assert tuple(got.shape) == tuple(want.shape), f"{kind} of {name}: {tuple(got.shape)}"
        assert_equal(whole[name], want, f"{kind} of {name}", rtol, atol)
        if not is_sharded(leaf):
            assert not is_sharded(got), (
                f"{kind} of {name} is sharded: a plain tensor's must be plain"
            )
            continue
        assert is_sharded(got), f"{kind} of {name} is plain: a sharded tensor's must be sharded"
        if got is leaf.grad:
            assert got.to_local().shape == leaf.to_local().shape, (
                f"{kind} of {name}: piece {tuple(got.to_local().shape)}, the tensor's own is "
                f"{tuple(leaf.to_local().shape)}"
            )


def check_same_as_serial(
    function: Callable[..., Any] | nn.Module,
    inputs: Sequence[Any],
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None = None,
    *,
    sizes: dict[int, Sequence[int]] | None = None,
    plain: Sequence[Any] = (),
    second: bool = True,
    no_fallback: bool = True,
    output_sharded: bool | None = None,
    requires_grad: bool = True,
    rtol: float = RTOL,
    atol: float = ATOL,
    seed: int = 0,
) -> list[Tensor]:
    """Runs `function` on full tensors and on pieces, and asserts that nothing differs.

    Args:
        function: takes `*inputs, *plain`; a module is copied, so that both runs start alike.
        inputs: full tensors (cut by `placements` and `sizes`), or `Cut`s of their own.
        mesh: the mesh of the sharded run.
        placements: one per mesh axis, for every input that is not a `Cut`.
        sizes: piece lengths per mesh axis, for every input that is not a `Cut`.
        plain: further arguments, the same in both runs (tensors: replicated, with gradient).
        second: also compare the gradients of the sum of squared input gradients.
        no_fallback: assert that the report counts no gather.
        output_sharded: assert the kind of every output, if given.
        requires_grad: whether floating-point inputs are leaves with a gradient.
        rtol: relative tolerance.
        atol: absolute tolerance.
        seed: of the loss's weights.

    Returns:
        The sharded run's outputs.
    """

    def leaf(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        wants = requires_grad and (t.is_floating_point() or t.is_complex())
        return t.detach().clone().requires_grad_(wants)

    cuts = [
        value if isinstance(value, Cut) else Cut(value, list(placements or ()), dict(sizes or {}))
        for value in inputs
    ]
    serial_function = copy.deepcopy(function) if isinstance(function, nn.Module) else function
    serial = _run(
        serial_function, [leaf(c.full) for c in cuts] + [leaf(p) for p in plain], seed, second
    )
    pieces = []
    for cut in cuts:
        piece = scatter(cut, mesh).detach()
        wants = requires_grad and (piece.is_floating_point() or piece.is_complex())
        pieces.append(piece.requires_grad_(wants))
    with shardfield.report() as report:
        ours = _run(function, pieces + [leaf(p) for p in plain], seed, second)
    assert len(ours.outputs) == len(serial.outputs)
    outputs = [full(out.detach()) for out in ours.outputs]
    for i, (got, want) in enumerate(zip(outputs, serial.outputs, strict=True)):
        assert_equal(got, want, f"output {i}", rtol, atol)
        assert tuple(ours.outputs[i].shape) == tuple(want.shape), f"output {i}: shape"
        if output_sharded is not None:
            assert is_sharded(ours.outputs[i]) == output_sharded, (
                f"output {i} is {'plain' if output_sharded else 'sharded'}"
            )
    _compare_gradients("gradient", ours, serial, "first", rtol, atol)
    _compare_gradients("second gradient", ours, serial, "second", rtol, atol)
    for name, want in serial.buffers.items():
        assert_equal(ours.buffers[name], want, f"buffer {name}", rtol, atol)
    if no_fallback:
        assert not report.fallbacks, f"gathered: {dict(report.fallbacks)}"
    return ours.outputs
