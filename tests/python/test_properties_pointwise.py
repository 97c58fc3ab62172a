"""Randomised: pointwise operators, reductions, views, norms, matrix products."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from drawing import Drawn, base_seed, check_draws, values
from torch import nn

UNARY = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "mish": F.mish,
    "elu": F.elu,
    "celu": F.celu,
    "selu": F.selu,
    "softplus": F.softplus,
    "hardtanh": F.hardtanh,
    "hardswish": F.hardswish,
    "hardsigmoid": F.hardsigmoid,
    "relu6": F.relu6,
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1),
    "softsign": F.softsign,
    "tanhshrink": F.tanhshrink,
    "softshrink": F.softshrink,
    "logsigmoid": F.logsigmoid,
    "glu": lambda x: F.glu(torch.cat([x, 2 * x], -1), -1),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "exp": torch.exp,
    "expm1": torch.expm1,
    "log": lambda x: torch.log(x.abs() + 0.1),
    "log1p": lambda x: torch.log1p(x.abs()),
    "sqrt": lambda x: torch.sqrt(x.abs() + 0.1),
    "rsqrt": lambda x: torch.rsqrt(x.abs() + 0.1),
    "sin": torch.sin,
    "cos": torch.cos,
    "atan": torch.atan,
    "erf": torch.erf,
    "sinh": torch.sinh,
    "asinh": torch.asinh,
    "lgamma": lambda x: torch.lgamma(x.abs() + 1),
    "square": torch.square,
    "reciprocal": lambda x: torch.reciprocal(x.abs() + 0.5),
    "abs": torch.abs,
    "neg": torch.neg,
    "sign": lambda x: torch.sign(x) * x,
    "floor": lambda x: torch.floor(x) + x,
    "round": lambda x: torch.round(x, decimals=1) * x,
    "frac": torch.frac,
    "trunc": lambda x: torch.trunc(x) * x,
    "clamp": lambda x: x.clamp(-0.5, 0.7),
    "clamp_min": lambda x: x.clamp(min=0.1),
    "pow": lambda x: x**3,
    "pow_scalar_base": lambda x: 2.0**x,
    "masked_fill": lambda x: x.masked_fill(x > 0.3, 2.0),
    "where_scalar": lambda x: torch.where(x > 0, x, 0.0),
    "threshold": lambda x: F.threshold(x, 0.1, 0.5),
    "nan_to_num": lambda x: torch.nan_to_num(x / (x > 0).double()),
    "cast": lambda x: x.float().double() * x,
    "add_scalar": lambda x: x + 1.5,
    "rsub": lambda x: 1 - x,
    "fmod": lambda x: torch.fmod(x, 0.7),
    "remainder": lambda x: torch.remainder(x, 0.7),
    "logit": lambda x: torch.logit(x.sigmoid()),
    "prelu": lambda x: F.prelu(x, torch.full((1,), 0.2, dtype=x.dtype)),
    "hardshrink": F.hardshrink,
    "threshold_": lambda x: F.threshold_(x * 1, 0.1, 0.5),
    "polygamma": lambda x: torch.polygamma(1, x.abs() + 1),
}

ONCE_DIFFERENTIABLE = {"hardsigmoid"}

BINARY = {
    "add": torch.add,
    "add_alpha": lambda a, b: torch.add(a, b, alpha=2.5),
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda a, b: a / (b.abs() + 1),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "pow": lambda a, b: (a.abs() + 0.5) ** b,
    "atan2": torch.atan2,
    "hypot": torch.hypot,
    "where": lambda a, b: torch.where(a > b, a, b),
    "lerp": lambda a, b: torch.lerp(a, b, 0.3),
    "addcmul": lambda a, b: torch.addcmul(a, a, b, value=0.5),
    "addcdiv": lambda a, b: torch.addcdiv(a, a, b.abs() + 1),
    "logaddexp": torch.logaddexp,
    "copysign": torch.copysign,
    "xlogy": lambda a, b: torch.xlogy(a, b.abs() + 0.1),
    "masked_fill_tensor": lambda a, b: a.masked_fill(b > 0, 1.0),
    "compare": lambda a, b: a * (a >= b) + b * (a < b),
}


def unary(rng: random.Random) -> Drawn:
    name = rng.choice(list(UNARY))
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    options = {"second": name not in ONCE_DIFFERENTIABLE}
    return Drawn(name, UNARY[name], values(rng, *shape), range(len(shape)), options=options)


def binary(rng: random.Random) -> Drawn:
    """The other operand is plain and may broadcast, or lack leading dims."""
    name = rng.choice(list(BINARY))
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    other = [n if rng.random() < 0.7 else 1 for n in shape][rng.randrange(len(shape)) :]
    return Drawn(
        f"{name} with plain {other}",
        BINARY[name],
        values(rng, *shape),
        range(len(shape)),
        [values(rng, *other)],
    )


def reduce(rng: random.Random) -> Drawn:
    name = rng.choice(
        ["sum", "mean", "amax", "amin", "var", "std", "logsumexp", "norm", "softmax", "log_softmax",
         "max", "min"]
    )  # fmt: skip
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    dims = rng.sample(range(len(shape)), rng.randint(1, len(shape)))
    keep = rng.random() < 0.5
    calls = {
        "sum": lambda x: x.sum(dims, keepdim=keep),
        "mean": lambda x: x.mean(dims, keepdim=keep),
        "amax": lambda x: x.amax(dims, keepdim=keep),
        "amin": lambda x: x.amin(dims, keepdim=keep),
        "var": lambda x: x.var(dims, correction=0, keepdim=keep),
        "std": lambda x: (
            (x * x + 1).std(dims, correction=0, keepdim=keep)
            if all(x.shape[d] > 1 for d in dims[:1])
            else x
        ),
        "logsumexp": lambda x: x.logsumexp(dims, keepdim=keep),
        "norm": lambda x: torch.linalg.vector_norm(x, 2, dims, keepdim=keep),
        "softmax": lambda x: x.softmax(dims[0]),
        "log_softmax": lambda x: x.log_softmax(dims[0]),
        "max": lambda x: x.max(dims[0], keepdim=keep).values,
        "min": lambda x: x.min(dims[0], keepdim=keep).values,
    }
    return Drawn(
        f"{name} over {dims} keepdim {keep}", calls[name], values(rng, *shape), range(len(shape))
    )


def view(rng: random.Random) -> Drawn:
    nd = rng.randint(2, 4)
    shape = [rng.randint(2, 6) for _ in range(nd)]
    order = rng.sample(range(nd), nd)
    d, e = rng.randrange(nd), rng.randrange(nd)
    start = rng.randrange(shape[d])
    stop = rng.randint(start + 1, shape[d])
    step = rng.randint(1, 3)
    calls = {
        f"permute {order}": lambda x: x.permute(order) * 2,
        f"transpose {d} {e}": lambda x: x.transpose(d, e) * 2,
        f"slice {d} {start}:{stop}:{step}": lambda x: (
            x[(slice(None),) * d + (slice(start, stop, step),)] * 2
        ),
        f"select {d} {start}": lambda x: x.select(d, start) * 2,
        f"unsqueeze {d}": lambda x: x.unsqueeze(d) * 2,
        f"flip {d} {e}": lambda x: x.flip([d] if d == e else [d, e]),
        f"roll {start} {d}": lambda x: x.roll((start, -start), (d, e)),
        f"split {d}": lambda x: x.split(step, d),
        f"chunk {d}": lambda x: x.chunk(step + 1, d),
        f"cat {d}": lambda x: torch.cat([x, x * 2, x[(slice(None),) * d + (slice(0, start),)]], d),
        f"stack {d}": lambda x: torch.stack([x, x * 2], d),
        f"unbind {d}": lambda x: x.unbind(d),
        f"expand at {d}": lambda x: x.unsqueeze(d).expand(*shape[:d], 3, *shape[d:]) * 2,
        "flatten": lambda x: x.flatten(min(d, e), max(d, e)) * 2,
        f"narrow {d}": lambda x: x.narrow(d, start, stop - start) * 2,
        f"repeat_interleave whole {d}": lambda x: x.repeat([2 if i == d else 1 for i in range(nd)]),
    }
    text = rng.choice(list(calls))
    options = {"no_fallback": not text.startswith(("flatten", "repeat"))}
    return Drawn(text, calls[text], values(rng, *shape), range(nd), options=options)


def norm(rng: random.Random) -> Drawn:
    nd = rng.randint(1, 3)
    lengths = [rng.randint(2, 6) for _ in range(nd)]
    batch, channels = rng.randint(2, 3), 4
    affine = rng.random() < 0.7
    track = rng.random() < 0.5
    batch_norm = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}[nd]
    instance = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}[nd]
    modules = [
        batch_norm(
            channels,
            affine=affine,
            track_running_stats=track,
            momentum=rng.choice([0.1, 0.7, None]),
        ),
        instance(channels, affine=affine, track_running_stats=track),
        nn.GroupNorm(rng.choice([1, 2, 4]), channels, affine=affine),
        nn.LayerNorm(lengths[rng.randrange(nd) :], elementwise_affine=affine),
        nn.LayerNorm([channels, *lengths], elementwise_affine=affine),
        nn.RMSNorm(lengths[-1], elementwise_affine=affine),
        nn.LocalResponseNorm(rng.randint(1, 4)),
    ]
    module = rng.choice(modules).double()
    for p in module.parameters():
        p.data = values(rng, *p.shape)
    if rng.random() < 0.25:
        module.eval()
    first = 2 if not isinstance(module, (nn.GroupNorm, nn.BatchNorm1d)) else rng.choice([0, 2])
    return Drawn(
        f"{module} {'training' if module.training else 'eval'}",
        module,
        values(rng, batch, channels, *lengths),
        range(first, 2 + nd),
        options={"rtol": 1e-8, "atol": 1e-9},
    )


def linear(rng: random.Random) -> Drawn:
    shape = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    wide = rng.randint(1, 5)
    bias = [values(rng, wide)] if rng.random() < 0.5 else []
    return Drawn(
        f"linear to {wide} bias {bool(bias)}",
        F.linear,
        values(rng, *shape),
        range(len(shape)),
        [values(rng, wide, shape[-1]), *bias],
    )


def matmul(rng: random.Random) -> Drawn:
    left = [rng.randint(1, 5) for _ in range(rng.randint(1, 4))]
    columns = rng.randint(1, 5)
    right = [*left[:-2], left[-1], columns] if rng.random() < 0.6 else [left[-1], columns]
    if rng.random() < 0.15:
        right = [left[-1]]
    return Drawn(
        f"matmul with plain {right}",
        torch.matmul,
        values(rng, *left),
        range(len(left)),
        [values(rng, *right)],
    )


FAMILIES = {f.__name__: f for f in (unary, binary, reduce, view, norm, linear, matmul)}


def draws(mesh, family: str, seeds: list[int]) -> None:
    check_draws(mesh, FAMILIES[family], seeds)


@pytest.mark.parametrize("family", FAMILIES)
def test_pointwise(run_mesh, mesh_shape, family):
    base = base_seed()
    seeds = list(range(base, base + (12 if mesh_shape == (1,) else 25)))
    print(f"seeds {seeds[0]} to {seeds[-1]}; repeat one with SHARDFIELD_SEED")
    run_mesh(mesh_shape, draws, family=family, seeds=seeds, limit_s=180)


def unary_by_name(mesh, name: str) -> None:
    from oracle import check_same_as_serial, numbers
    from torch.distributed.tensor import Shard

    check_same_as_serial(
        UNARY[name],
        [numbers(3, 5)],
        mesh,
        [Shard(1)],
        sizes={0: [4, 1]},
        second=name not in ONCE_DIFFERENTIABLE,
    )


@pytest.mark.parametrize("name", UNARY)
def test_every_pointwise_operator(run_mesh, name):
    run_mesh((2,), unary_by_name, name=name)


def binary_by_name(mesh, name: str) -> None:
    from oracle import Cut, check_same_as_serial, numbers
    from torch.distributed.tensor import Shard

    a = Cut(numbers(3, 5), [Shard(1)], {0: [4, 1]})
    b = Cut(numbers(3, 5, seed=1), [Shard(1)], {0: [4, 1]})
    check_same_as_serial(BINARY[name], [a, b], mesh)
    check_same_as_serial(BINARY[name], [a], mesh, plain=[numbers(5, seed=2)])
    check_same_as_serial(
        BINARY[name], [a, Cut(numbers(3, 5, seed=1), [Shard(1)], {0: [2, 3]})], mesh
    )
    check_same_as_serial(BINARY[name], [a, Cut(numbers(3, 5, seed=1), [Shard(0)])], mesh)


@pytest.mark.parametrize("name", BINARY)
def test_every_binary_operator(run_mesh, name):
    run_mesh((2,), binary_by_name, name=name)


LENGTHENED = {
    "mul": lambda x, y: x * y,
    "add_bias": lambda x, y: torch.add(x, y, alpha=2) ** 2,
    "where": lambda x, y: torch.where(y.detach() > 0, x, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
}


def lengthened(mesh) -> None:
    """A cut on a dim of size 1 that broadcasting makes longer goes to the longer dim."""
    from oracle import Cut, check_same_as_serial, is_sharded, numbers, scatter
    from torch.distributed.tensor import Shard

    import shardfield

    row, column = Cut(numbers(1, 5), [Shard(0)]), Cut(numbers(4, 1), [Shard(1)])
    for function in LENGTHENED.values():
        check_same_as_serial(function, [row], mesh, plain=[numbers(4, 5, seed=1)])
        check_same_as_serial(function, [column, row], mesh)
        check_same_as_serial(function, [row, Cut(numbers(2, 4, 5, seed=1), [Shard(2)])], mesh)
    with shardfield.report() as report:
        assert is_sharded(scatter(row, mesh) + numbers(4, 5))
    assert not report.fallbacks


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cut_rows_of_size_one_broadcast(run_mesh, size):
    run_mesh((size,), lengthened)
