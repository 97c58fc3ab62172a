"""Dropout and random filling: one mask for any mesh, gradients by the mask, exact ends."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, full, is_sharded, numbers, scatter, sharded
from shardfield.domain_parallel import sync_module_over_mesh
from torch import nn
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

import shardfield

SHAPE = (3, 4, 6, 5)

DRAWS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout_": lambda x: F.dropout(x * 1, 0.3, inplace=True),
    "dropout1d": lambda x: F.dropout1d(x.flatten(2), 0.3),
    "dropout2d": lambda x: F.dropout2d(x, 0.3),
    "dropout2d_": lambda x: F.dropout2d(x * 1, 0.3, inplace=True),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, True),
    "alpha_": lambda x: F.alpha_dropout(x * 1, 0.3, True, True),
    "feature_alpha": lambda x: F.feature_alpha_dropout(x, 0.3, True),
    "native": lambda x: torch.native_dropout(x, 0.3, True)[0],
    "rrelu": lambda x: F.rrelu(x - 1.5, training=True),
    "bernoulli": lambda x: torch.bernoulli(x.detach() * 0.4),
    "bernoulli_p": lambda x: torch.bernoulli(x, 0.4),
    "bernoulli_": lambda x: torch.empty_like(x).bernoulli_(0.4),
    "bernoulli_tensor": lambda x: torch.empty_like(x).bernoulli_(torch.full((5,), 0.4)),
    "rand_like": torch.rand_like,
    "rand_float": lambda x: torch.rand_like(x, dtype=torch.float32),
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 10),
    "normal_": lambda x: torch.empty_like(x).normal_(1, 2),
    "uniform_": lambda x: torch.empty_like(x).uniform_(-1, 2),
    "exponential_": lambda x: torch.empty_like(x).exponential_(2),
    "random_": lambda x: torch.empty_like(x).random_(7),
    "merged": lambda x: F.dropout(x.permute(0, 2, 3, 1).reshape(-1, 4), 0.3),
}


def draw(mesh, dims: tuple[int, ...], sizes: list[int] | None) -> dict:
    """Every draw in full, by name."""
    torch.manual_seed(0)
    x = scatter(
        Cut(
            torch.ones(SHAPE, dtype=torch.float64),
            [Shard(d) for d in dims],
            {0: sizes} if sizes else {},
        ),
        mesh,
    )
    values = {}
    for name, function in DRAWS.items():
        with shardfield.report() as report:
            y = function(x)
        assert is_sharded(y), name
        assert not report.fallbacks, (name, report.fallbacks)
        values[name] = full(y).flatten().tolist()
    return values


LAYOUTS = [
    ((1,), (0,), None),
    ((2,), (2,), None),
    ((2,), (0,), [3, 0]),
    ((3,), (2,), [1, 0, 5]),
    ((3,), (3,), None),
    ((4,), (1,), None),
    ((2, 2), (0, 2), None),
    ((2, 2), (2, 2), None),
]


def test_values_are_those_of_one_rank(run_mesh):
    first = None
    for shape, dims, sizes in LAYOUTS:
        for values in run_mesh(shape, draw, dims=dims, sizes=sizes):
            first = first or values
            for name, value in values.items():
                assert value == first[name], f"{name} on {shape} cut on {dims} {sizes}"
    masks = torch.tensor(first["dropout2d"]).view(12, 30)
    assert bool((masks == masks[:, :1]).all()), "whole channels are dropped"


def moments(mesh) -> dict:
    torch.manual_seed(1)
    x = scatter(Cut(torch.ones(40, 500, dtype=torch.float64), [Shard(1)]), mesh)
    draws = {
        "normal": torch.randn_like(x),
        "uniform": torch.rand_like(x),
        "exponential": torch.empty_like(x).exponential_(),
        "bernoulli": torch.bernoulli(x, 0.25),
        "dropout": F.dropout(x, 0.25),
        "integers": torch.randint_like(x, 0, 5),
        "alpha": F.alpha_dropout(torch.randn_like(x), 0.25, True),
    }
    return {name: [float(full(y).mean()), float(full(y).var())] for name, y in draws.items()}


def test_moments(run_mesh):
    want = {
        "normal": (0, 1),
        "uniform": (0.5, 1 / 12),
        "exponential": (1, 1),
        "bernoulli": (0.25, 0.1875),
        "dropout": (1, 1 / 3),
        "integers": (2, 2),
        "alpha": (0, 1),
    }
    for name, (mean, variance) in run_mesh((2,), moments)[0].items():
        assert mean == pytest.approx(want[name][0], abs=0.03), name
        assert variance == pytest.approx(want[name][1], rel=0.06), name


def gradients(mesh, dims: tuple[int, ...]) -> None:
    for name in ("dropout", "dropout_", "dropout2d", "native", "dropout2d_"):
        torch.manual_seed(5)
        x = scatter(Cut(numbers(*SHAPE), [Shard(d) for d in dims]), mesh).requires_grad_()
        y = DRAWS[name](x)
        (g,) = torch.autograd.grad((y * y).sum(), x, create_graph=True)
        factor = full(y.detach()) / numbers(*SHAPE)
        assert_equal(g, 2 * factor * full(y.detach()), name)
        (second,) = torch.autograd.grad(g.sum(), x)
        assert_equal(second, 2 * factor.square(), f"{name}: second gradient", 1e-7)
        kept = factor != 0
        assert_equal(factor[kept], torch.full_like(factor[kept], 1 / 0.7), name)


@pytest.mark.parametrize("dim", range(4))
def test_gradient_is_the_mask(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, gradients, dims=(dim,) * len(mesh_shape))


def exact_ends(mesh) -> None:
    x = sharded(numbers(4, 5), mesh, 0)
    state = torch.get_rng_state()
    for function in (F.dropout, F.alpha_dropout, F.feature_alpha_dropout, F.dropout1d):
        y = function(x[None] if function is F.dropout1d else x, 0.0, True)
        assert torch.equal(full(y).view(4, 5), full(x))
        y = function(x[None] if function is F.dropout1d else x, 0.7, False)
        assert torch.equal(full(y).view(4, 5), full(x))
        y = function(x[None] if function is F.dropout1d else x, 1.0, True)
        assert not full(y).any()
    assert torch.equal(state, torch.get_rng_state()), "nothing was drawn"
    with pytest.raises((RuntimeError, ValueError), match="probability"):
        torch.dropout(x, 1.5, True)
    assert torch.equal(full(torch.bernoulli(x, 0.0)), torch.zeros(4, 5, dtype=torch.float64))
    assert torch.equal(full(torch.bernoulli(x, 1.0)), torch.ones(4, 5, dtype=torch.float64))


def test_probability_zero_one_and_evaluation(run_mesh, mesh_shape):
    if len(mesh_shape) == 1:
        run_mesh(mesh_shape, exact_ends)
    else:
        run_mesh(mesh_shape, gradients, dims=(0, 2))


def recomputed(mesh, reentrant: bool) -> None:
    torch.manual_seed(2)
    x = sharded(numbers(6, 40), mesh, 1).requires_grad_()
    y = checkpoint(lambda t: F.dropout(t * t, 0.5), x, use_reentrant=reentrant)
    torch.rand(3)  # what comes later must not shift the recomputation
    y.sum().backward()
    mask = full(y.detach()) / full(x.detach()).square()
    assert_equal(x.grad, 2 * full(x.detach()) * mask, "recomputed mask", 1e-7)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_repeats_the_mask(run_mesh, reentrant):
    run_mesh((2,), recomputed, reentrant=reentrant)


def explicit_generator(mesh) -> None:
    x = sharded(torch.ones(8, 8), mesh, 1)
    draws = [
        full(torch.empty_like(x).normal_(generator=torch.Generator().manual_seed(seed)))
        for seed in (3, 3, 4)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])


def test_explicit_generator(run_mesh):
    run_mesh((2,), explicit_generator)


def different_states(mesh) -> str:
    from torch.distributed.device_mesh import init_device_mesh

    fresh = init_device_mesh("cpu", (1, mesh.size()), mesh_dim_names=("one", "domain"))
    torch.manual_seed(mesh.get_rank())
    x = scatter(Cut(torch.ones(8), [Shard(0)]), fresh["domain"])
    with pytest.raises(RuntimeError) as caught:
        F.dropout(x, 0.5)
    net = nn.Dropout(0.5)
    sync_module_over_mesh(net, fresh["domain"])
    assert is_sharded(net(x))
    return str(caught.value)


def test_different_generator_states_are_refused(run_mesh):
    for text in run_mesh((2,), different_states):
        assert text.startswith("aten::dropout: expected equal random generator states")
        assert "sync_module_over_mesh(module, mesh)" in text
