"""DTensor meets ShardTensor: conversion both ways, and weights that DTensor holds in shards."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, full, is_sharded, numbers, scatter, sharded
from rank_pool import mesh_of
from shardfield.domain_parallel import ShardTensor, local_map, scatter_tensor, shard_tensor
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor._dtensor_spec import DTensorSpec, ShardOrderEntry, TensorMeta
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

STRIDED = [_StridedShard(0, split_factor=2), Shard(0)]
KINDS = {
    (1,): [[Shard(0)], [Shard(1)]],
    (2,): [[Shard(0)], [Shard(-1)]],
    (3,): [[Shard(0)], [Shard(1)]],
    (4,): [[Shard(0)], [Shard(1)]],
    (2, 2): [[Shard(0), Shard(1)], [Shard(1), Shard(1)], [Replicate(), Shard(0)], STRIDED],
}


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else full(value)


def address(value: torch.Tensor) -> int:
    return value.to_local().data_ptr()


def curvature(x0: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """First gradient of sum(sin x), and the gradient of its square."""
    return x0.cos(), -2 * x0.cos() * x0.sin()


def both_ways(mesh, placements) -> None:
    """7 rows: DTensor's own division is uneven, with an empty piece on 4 ranks."""
    x0 = numbers(7, 5)
    first, second = curvature(x0)
    x = shard_tensor(x0, mesh, placements).detach().requires_grad_()
    d = x.to_dtensor()
    assert isinstance(d, DTensor) and tuple(d.placements) == x.placements
    assert d.device_mesh == x.device_mesh and d.shape == x.shape and d.stride() == x.stride()
    assert address(d) == address(x)
    assert_equal(d.full_tensor(), x0, "as DTensor")
    (grad,) = torch.autograd.grad(d.sin().sum().full_tensor(), x, create_graph=True)
    assert is_sharded(grad)
    assert_equal(grad, first, "gradient through to_dtensor")
    assert_equal(torch.autograd.grad(grad.square().sum(), x)[0], second, "second gradient")

    if placements == STRIDED:  # PyTorch distributes even ones only
        w = shard_tensor(x0, mesh, placements).to_dtensor().requires_grad_()
    else:
        w = distribute_tensor(x0, mesh, placements).requires_grad_()
    y = ShardTensor.from_dtensor(w)
    assert is_sharded(y) and y.placements == x.placements and address(y) == address(w)
    assert_equal(y, x0, "from DTensor")
    (grad,) = torch.autograd.grad(y.sin().sum(), w, create_graph=True)
    assert isinstance(grad, DTensor) and grad.placements == w.placements
    assert_equal(grad.full_tensor(), first, "gradient through from_dtensor")
    (twice,) = torch.autograd.grad(grad.square().sum(), w)
    assert_equal(twice.full_tensor(), second, "second gradient")
    assert address(y.detach().to_dtensor()) == address(w)


def test_both_ways_share_memory(run_mesh, mesh_shape):
    for placements in KINDS[mesh_shape]:
        run_mesh(mesh_shape, both_ways, placements=placements)


def gradient_in_other_placements(mesh) -> None:
    """The second gradient survives where DTensor hands back a replicated gradient."""
    x0 = numbers(7, 5)
    x = shard_tensor(x0, mesh, [Shard(0)]).detach().requires_grad_()
    out = x.to_dtensor().redistribute(placements=[Replicate()]).to_local().sin().sum()
    (grad,) = torch.autograd.grad(out, x, create_graph=True)
    assert_equal(grad, curvature(x0)[0], "gradient")
    assert_equal(torch.autograd.grad(grad.square().sum(), x)[0], curvature(x0)[1], "second")


def plain_and_partial(mesh) -> None:
    x0 = numbers(4, 3)
    plain = ShardTensor.from_dtensor(distribute_tensor(x0, mesh, [Replicate()]))
    assert not is_sharded(plain) and type(plain) is torch.Tensor
    assert_equal(plain, x0, "replicated")
    total = ShardTensor.from_dtensor(DTensor.from_local(x0, mesh, [Partial()]))
    assert_equal(total, mesh.size() * x0, "partial sums are added")
    assert not hasattr(x0, "to_dtensor")


def memory_order(mesh) -> None:
    x0 = numbers(2, 3, 6, 4).to(memory_format=torch.channels_last)
    half = x0.chunk(2, 2)[mesh.get_rank()].clone(memory_format=torch.channels_last)
    x = ShardTensor.from_local(half, mesh, [Shard(2)])
    d = x.to_dtensor()
    assert d.stride() == x0.stride()
    back = ShardTensor.from_dtensor(d)
    assert back.stride() == x0.stride() and address(back) == address(x)


@pytest.mark.parametrize("case", [gradient_in_other_placements, plain_and_partial, memory_order])
def test_conversion(run_mesh, case):
    run_mesh((2,), case)


def foreign_pieces(mesh) -> None:
    x0 = numbers(9, 3)
    x = sharded(x0, mesh, 0, [7, 2]).requires_grad_()
    with pytest.raises(
        ValueError, match=r"expected pieces of \{0: \[5, 4\]\}.*\{0: \[7, 2\]\}.*move=True"
    ):
        x.to_dtensor()
    moved = x.to_dtensor(move=True)
    assert_equal(moved.full_tensor(), x0, "moved")
    (grad,) = torch.autograd.grad(moved.sin().sum().full_tensor(), x)
    assert grad.to_local().shape == x.to_local().shape
    assert_equal(grad, x0.cos(), "gradient of moved rows")
    if mesh.ndim == 1:
        merged = sharded(numbers(3, 4, 2), mesh, 1, [3, 1]).flatten(0, 1)
        with pytest.raises(ValueError, match="to_dtensor: expected pieces"):
            merged.to_dtensor()
    lies = DTensor.from_local(
        x0[:2], mesh, [Shard(0)], run_check=False, shape=torch.Size([9, 3]), stride=(3, 1)
    )
    with pytest.raises(ValueError, match=r"expected a local tensor of .* got .2, 3. on rank"):
        ShardTensor.from_dtensor(lies)
    with pytest.raises(TypeError, match="expected a DTensor, got Tensor"):
        ShardTensor.from_dtensor(x0)


def test_pieces_without_a_dtensor_form(run_mesh):
    run_mesh((2,), foreign_pieces)


def other_device_order(mesh) -> None:
    order = (ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),)
    meta = TensorMeta(torch.Size([8, 3]), (3, 1), torch.float64)
    spec = DTensorSpec(mesh, (Shard(0), Shard(0)), tensor_meta=meta, shard_order=order)
    d = DTensor(numbers(2, 3), spec, requires_grad=False)
    with pytest.raises(
        ValueError, match=r"expected mesh axes in mesh order, got \(1, 0\) on dim 0"
    ):
        ShardTensor.from_dtensor(d)


def test_other_device_order_is_refused(run_mesh):
    run_mesh((2, 2), other_device_order)


# ---- Weights that are DTensors over another mesh axis --------------------------------------------


CALLS = {
    "linear": (F.linear, (4, 6, 8), 1, [(10, 8), (10,)]),
    "linear_features": (F.linear, (4, 6, 8), 2, [(10, 8), (10,)]),
    "conv2d": (lambda x, w, b: F.conv2d(x, w, b, padding=1), (2, 2, 8, 6), 2, [(4, 2, 3, 3), (4,)]),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2),
        (2, 4, 5, 6),
        2,
        [(4, 3, 3, 3), (3,)],
    ),
    "layer_norm": (lambda x, w, b: F.layer_norm(x, (8,), w, b), (4, 6, 8), 1, [(8,), (8,)]),
    "group_norm": (lambda x, w, b: F.group_norm(x, 2, w, b), (2, 4, 6, 3), 2, [(4,), (4,)]),
    "add": (torch.add, (4, 6, 8), 1, [(6, 8)]),
    "add_reversed": (lambda x, w: w + x, (4, 6, 8), 1, [(6, 8)]),
    "add_in_place": (lambda x, w: (x * 1).add_(w), (4, 6, 8), 1, [(6, 8)]),
    "matmul": (torch.matmul, (4, 6, 8), 1, [(8, 5)]),
    "matmul_reversed": (lambda x, w: w @ x, (4, 6, 8), 2, [(5, 6)]),
    "cat": (lambda x, w: torch.cat([x, w], 0), (4, 6), 0, [(3, 6)]),
    "overload": (torch.ops.aten.mul.Tensor, (4, 6), 0, [(6,)]),
    "twice": (lambda x, w: (x @ w).tanh() @ w, (4, 6), 0, [(6, 6)]),
}


def domain_of() -> tuple[DeviceMesh, DeviceMesh]:
    named = mesh_of((2, 2), ("data", "domain"))
    return named["domain"], named["data"]


def run_call(function, x, weights):
    y = function(x, *weights)
    loss = (y * numbers(*y.shape, seed=9) + 0.5 * y * y).sum()
    first = torch.autograd.grad(loss, [x, *weights], create_graph=True)
    penalty = first[0].square().sum()
    for grad in first[1:]:
        penalty = penalty + whole(grad).square().sum()
    return y, first, torch.autograd.grad(penalty, [x, *weights], allow_unused=True)


def weights_over_data(mesh, name: str, kind: str) -> None:
    """A field cut by the domain axis, weights held by the data axis (or both axes, or the domain's)."""
    function, shape, dim, shapes = CALLS[name]
    domain, data = domain_of()
    held, placed = {
        "shard": (data, [Shard(0)]),
        "replicate": (data, [Replicate()]),
        "domain": (domain, [Shard(0)]),
        "both": (mesh, [Shard(0), Replicate()]),
    }[kind]
    x0, full_weights = numbers(*shape), [numbers(*s, seed=1 + i) for i, s in enumerate(shapes)]
    want = run_call(
        function, x0.clone().requires_grad_(), [w.clone().requires_grad_() for w in full_weights]
    )
    x = shard_tensor(x0, domain, [Shard(dim)]).detach().requires_grad_()
    weights = [distribute_tensor(w, held, placed).requires_grad_() for w in full_weights]
    got = run_call(function, x, weights)
    assert is_sharded(got[0]) == (name != "linear_features")
    assert_equal(got[0], want[0], "output")
    for order in (1, 2):
        for leaf, ours, serial in zip([x, *weights], got[order], want[order], strict=True):
            if serial is None:
                assert ours is None or not whole(ours).any()
                continue
            what = f"gradient {order} of {type(leaf).__name__}"
            assert_equal(whole(ours), serial, what)
            assert is_sharded(ours) if leaf is x else ours.placements == leaf.placements, what


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("kind", ["shard", "replicate", "domain", "both"])
def test_dtensor_weights(run_mesh, name, kind):
    run_mesh((2, 2), weights_over_data, name=name, kind=kind)


def other_samples(mesh) -> None:
    """Each data rank has a sample of its own: the gradient is that of the mean of their losses."""
    domain, data = domain_of()
    samples, w0 = numbers(2, 6, 4), numbers(5, 4, seed=1)
    w = w0.clone().requires_grad_()
    losses = [F.linear(s, w).sin().sum() for s in samples]
    (want,) = torch.autograd.grad(sum(losses) / 2, w, create_graph=True)
    (want_twice,) = torch.autograd.grad(want.square().sum(), w)
    x = shard_tensor(samples[data.get_local_rank()], domain, [Shard(0)])
    for placement in (Shard(0), Replicate()):
        held = distribute_tensor(w0, data, [placement]).requires_grad_()
        loss = F.linear(x, held).sin().sum()
        (got,) = torch.autograd.grad(loss, held, create_graph=True)
        assert_equal(got.full_tensor(), want, "gradient of the mean")
        (twice,) = torch.autograd.grad(got.full_tensor().square().sum(), held)
        assert_equal(twice.full_tensor(), want_twice, "second gradient of the mean")


def trained_module(mesh) -> None:
    """A module whose parameters distribute_module spread over the data axis, one step of SGD."""
    domain, data = domain_of()
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.GELU()).double()
    serial, x0 = copy.deepcopy(net), numbers(2, 2, 8, 6)

    def spread(name: str, module: nn.Module, over: DeviceMesh) -> None:
        for key, value in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(value, over, [Shard(0)])))

    net = distribute_module(net, data, spread)
    x = shard_tensor(x0, domain, [Shard(2)])
    for module, field in ((net, x), (serial, x0)):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            module(field).square().mean().backward()
            optimizer.step()
    for ours, want in zip(net.parameters(), serial.parameters(), strict=True):
        assert isinstance(ours.grad, DTensor)
        assert_equal(ours.detach().full_tensor(), want, "trained weight")


@pytest.mark.parametrize("case", [other_samples, trained_module])
def test_dtensor_modules(run_mesh, case):
    run_mesh((2, 2), case)


def refusals(mesh) -> None:
    domain, data = domain_of()
    x = shard_tensor(numbers(4, 6), domain, [Shard(0)])
    d = distribute_tensor(numbers(4, 6, seed=1), data, [Shard(0)])
    wide = parallelize_module(
        nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 6)).double(),
        data,
        {"0": ColwiseParallel(), "1": RowwiseParallel()},
    )
    for call in (
        lambda: d.add_(x),
        lambda: d.copy_(x),
        lambda: torch.add(x, x, out=d),
        lambda: d.__setitem__(slice(None), x),
        lambda: torch._foreach_add_([d, x], [x, x]),
    ):
        with pytest.raises(RuntimeError, match="got DTensors to write into beside sharded"):
            call()
    assert_equal(d.full_tensor(), numbers(4, 6, seed=1), "untouched")
    with pytest.raises(RuntimeError, match=r"from_local: expected a plain tensor.*to_dtensor"):
        DTensor.from_local(x, data, [Replicate()])
    with pytest.raises(RuntimeError, match=r"expected a plain tensor.*parallelize_module"):
        wide(x)
    with pytest.raises(RuntimeError, match="distribute_tensor: expected a plain tensor"):
        torch.distributed.tensor.distribute_tensor(x, data, [Shard(0)])


def handed_in(mesh) -> None:
    """DTensors where a sharded tensor is asked for: taken over, or refused by name."""
    x0 = numbers(6, 4)
    d = distribute_tensor(x0, mesh, [Shard(0)])
    x = sharded(numbers(6, 4, seed=1), mesh, 0, [5, 1]).requires_grad_()
    (x * 2).backward(d)
    assert x.grad.to_local().shape == x.to_local().shape
    assert_equal(x.grad, 2 * x0, "backward(d)")
    x.grad = d
    assert is_sharded(x.grad)
    assert_equal(x.grad, x0, "x.grad = d")
    assert_equal(
        local_map(torch.sin, [[Shard(1)]], [Shard(1)], mesh)(d), x0.sin(), "local_map takes it"
    )
    for call in (
        lambda: shard_tensor(d, mesh, [Shard(0)]),
        lambda: ShardTensor.from_local(d, mesh, [Shard(0)]),
    ):
        with pytest.raises(TypeError, match="expected a plain tensor, got a DTensor"):
            call()
    with pytest.raises(ValueError, match="must pass the full plain tensor"):
        scatter_tensor(d, 0, mesh, [Shard(0)])


def test_dtensors_handed_in(run_mesh):
    run_mesh((2,), handed_in)


def compiled_as_before(mesh) -> None:
    """Without a sharded tensor DTensor is what it was, in one graph too."""

    def function(x, w):
        return (x @ w).sin().sum()

    w = distribute_tensor(numbers(4, 4), mesh, [Shard(0)]).requires_grad_()
    x = distribute_tensor(numbers(4, 4, seed=1), mesh, [Replicate()])
    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    (got,) = torch.autograd.grad(compiled(x, w), w)
    (want,) = torch.autograd.grad(function(x, w), w)
    assert_equal(got.full_tensor(), want.full_tensor(), "compiled")


def test_what_does_not_fit_is_refused(run_mesh):
    run_mesh((2, 2), refusals)


def test_dtensors_alone_compile_as_before(run_mesh):
    run_mesh((2,), compiled_as_before)


def scattered_columns(mesh) -> None:
    """Uneven pieces meet a weight that DTensor divides evenly."""
    domain, data = domain_of()
    x0, w0 = numbers(9, 4), numbers(4, 3, seed=1)
    x = scatter(Cut(x0, [Shard(0)], {0: [9, 0]}), domain).requires_grad_()
    w = distribute_tensor(w0, data, [Shard(1)]).requires_grad_()
    y = x @ w
    assert y.to_local().shape[0] == (9, 0)[domain.get_local_rank()]
    assert_equal(y, x0 @ w0, "uneven")
    grads = torch.autograd.grad(y.square().sum(), [x, w])
    assert_equal(grads[0], 2 * (x0 @ w0) @ w0.t(), "of uneven pieces")
    assert_equal(grads[1].full_tensor(), 2 * x0.t() @ (x0 @ w0), "of the weight")


def test_uneven_pieces(run_mesh):
    run_mesh((2, 2), scattered_columns)
