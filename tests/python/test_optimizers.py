"""List ops, optimizers, gradient clipping and scaling with sharded and plain parameters mixed."""

from __future__ import annotations

import copy

import pytest
import torch
from oracle import assert_equal, full, is_sharded, numbers, sharded
from torch import nn

import shardfield

OPTIMIZERS = {
    "sgd": lambda p, **k: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, **k),
    "sgd_plain": lambda p, **k: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, **k),
    "adam": lambda p, **k: torch.optim.Adam(p, lr=0.1, amsgrad=True, **k),
    "adamw": lambda p, **k: torch.optim.AdamW(p, lr=0.1, **k),
}
WAYS = {"loop": {"foreach": False}, "foreach": {"foreach": True}, "fused": {"fused": True}}


def parameters(mesh, cut: bool) -> list[nn.Parameter]:
    """One parameter that is cut (unevenly), one cut otherwise, two plain ones."""
    n = mesh.size()
    values = [numbers(6, 3, seed=i) for i in range(4)]
    if cut:
        values[0] = sharded(values[0], mesh, 0, [6 - (n - 1)] + [1] * (n - 1))
        values[2] = sharded(values[2], mesh, 1)
    return [nn.Parameter(v) for v in values]


def loss_of(params) -> torch.Tensor:
    return sum(((p * p).sum() + p.sin().sum()) * (i + 1) for i, p in enumerate(params))


def train(mesh, make, way) -> None:
    ours, want = parameters(mesh, True), parameters(mesh, False)
    a, b = make(ours, **way), make(want, **way)
    with shardfield.report() as report:
        for _ in range(4):
            for params, optimizer in ((ours, a), (want, b)):
                optimizer.zero_grad()
                loss_of(params).backward()
                optimizer.step()
    for i, (p, q) in enumerate(zip(ours, want, strict=True)):
        assert is_sharded(p) == (i in (0, 2))
        assert is_sharded(p.grad) == (i in (0, 2))
        assert_equal(p, q, f"parameter {i}")
    assert not report.fallbacks, report.fallbacks
    state = a.state[ours[0]]
    assert all(is_sharded(v) for v in state.values() if isinstance(v, torch.Tensor) and v.dim())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(run_mesh, ranks, name, way):
    run_mesh((ranks,), train_named, name=name, way=way)


def train_named(mesh, name: str, way: str) -> None:
    train(mesh, OPTIMIZERS[name], WAYS[way])


def clip(mesh) -> None:
    replicated = nn.Parameter(torch.zeros(2))
    replicated.grad = torch.tensor([3.0, 4.0])
    cut = nn.Parameter(sharded(torch.zeros(4), mesh, 0))
    cut.grad = sharded(torch.ones(4), mesh, 0)
    for foreach in (True, False):
        grads = [copy.copy(replicated.grad.clone()), cut.grad.clone()]
        replicated.grad, cut.grad = grads[0].clone(), grads[1].clone()
        norm = nn.utils.clip_grad_norm_([replicated, cut], 1.0, foreach=foreach)
        assert abs(float(norm) - 5.38516) < 1e-5
        scale = 1 / (29**0.5 + 1e-6)
        assert_equal(replicated.grad, grads[0] * scale, "plain", 1e-6, 1e-6)
        assert_equal(cut.grad, full(grads[1]) * scale, "cut", 1e-6, 1e-6)
        replicated.grad, cut.grad = grads
    for p in (1.0, 3.0, float("inf")):
        want = torch.linalg.vector_norm(torch.tensor([3.0, 4, 1, 1, 1, 1]), p)
        norm = nn.utils.get_total_norm([replicated.grad, cut.grad], p, foreach=True)
        assert abs(float(norm) - float(want)) < 1e-5
    nn.utils.clip_grad_value_([replicated, cut], 0.5)
    assert_equal(cut.grad, torch.full((4,), 0.5), "clipped values")


def test_F11_norm_counts_every_element_once(run_mesh):
    run_mesh((4,), clip)


def list_ops(mesh) -> None:
    values = [numbers(5, 3, seed=i) for i in range(3)]
    ours = [sharded(values[0], mesh, 0), values[1], sharded(values[2], mesh, 1)]
    other = [sharded(values[1], mesh, 1), values[2], values[0]]
    plain_other = [values[1], values[2], values[0]]
    with shardfield.report() as report:
        for got, want in zip(
            torch._foreach_add(ours, other, alpha=2),
            torch._foreach_add(values, plain_other, alpha=2),
            strict=True,
        ):
            assert_equal(got, want, "_foreach_add")
        for got, want in zip(torch._foreach_norm(ours), torch._foreach_norm(values), strict=True):
            assert_equal(got, want, "_foreach_norm")
        for got, want in zip(
            torch._foreach_max(ours) if hasattr(torch, "_foreach_max") else [],
            torch._foreach_max(values) if hasattr(torch, "_foreach_max") else [],
            strict=True,
        ):
            assert_equal(got, want, "_foreach_max")
        copies = [t.clone() for t in ours]
        torch._foreach_mul_(copies, 3.0)
        torch._foreach_lerp_(copies, other, 0.25)
        torch._foreach_sqrt_(torch._foreach_abs(copies))
        want = [(3 * v).lerp(o, 0.25) for v, o in zip(values, plain_other, strict=True)]
        for got, expected in zip(copies, want, strict=True):
            assert_equal(got, expected, "in place")
        torch._foreach_zero_(copies)
        assert all(not full(c).any() for c in copies)
    assert not report.fallbacks, report.fallbacks
    leaves = [t.clone().requires_grad_() for t in ours]
    sum((t * t).sum() for t in torch._foreach_mul(leaves, 2.0)).backward()
    for leaf, value in zip(leaves, values, strict=True):
        assert is_sharded(leaf.grad) == is_sharded(leaf)
        assert_equal(leaf.grad, 8 * value, "gradient of _foreach_mul")


def test_list_ops(run_mesh, ranks):
    run_mesh((ranks,), list_ops)


def overflow(mesh) -> None:
    """An overflow on one rank's piece stops the step on all of them."""
    rank = mesh.get_local_rank()
    last = mesh.size() - 1
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=1000)
    p = nn.Parameter(sharded(torch.ones(8), mesh, 0))
    q = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p, q], lr=0.5)
    for bad in (False, True):
        optimizer.zero_grad()
        scaler.scale((p * p).sum() + q.sum()).backward()
        if bad and rank == last:
            p.grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()
        assert_equal(p, torch.zeros(8), "sharded parameter")
        assert_equal(q, torch.full((2,), 0.5), "plain parameter")
    assert scaler.get_scale() == 2.0


def test_gradient_scaler_skips_together(run_mesh, ranks):
    run_mesh((ranks,), overflow)
