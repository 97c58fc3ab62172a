"""The laws of the design, one by one, and training over the data axis of a 2 x 2 mesh."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import assert_equal, full, is_sharded, numbers, sharded
from rank_pool import mesh_of
from shardfield.domain_parallel import ShardTensor, shard_tensor, sync_module_over_mesh
from torch import nn
from torch.distributed.tensor import Replicate, Shard

import shardfield


def net() -> nn.Module:
    """Convolutions of three kinds, a norm, smooth activations and resampling."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.GELU(),
        nn.Conv2d(4, 8, 4, stride=2, padding=1),
        nn.SiLU(),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(8, 2, 5, padding=2, padding_mode="circular"),
    ).double()


# --------------------------------------------------------------------------- 1: plain is replicated


def plain_results(mesh) -> None:
    x = sharded(numbers(2, 3, 9), mesh, 2)
    for value in (x.sum(), x.mean(), x.mean(2), x.amax((1, 2)), (x * x).sum(2), x.norm()):
        assert not is_sharded(value)
        values = [torch.empty_like(value) for _ in range(mesh.size())]
        dist.all_gather(values, value.contiguous(), group=mesh.get_group())
        assert all(torch.equal(v, value) for v in values), "equal bit by bit on every rank"
    assert isinstance(x.mean().item(), float)
    assert "tensor(" in repr(x.mean())
    w = numbers(3, 1, seed=1)
    assert is_sharded(x * w) and is_sharded(w * x) and is_sharded(torch.add(w, x))
    assert_equal(w - x, w - numbers(2, 3, 9), "plain on the left")


def test_law_1_results_and_operands_that_are_plain(run_mesh, ranks):
    run_mesh((ranks,), plain_results)


# --------------------------------------------------------- 2: gradients of plain tensors are serial


# ------------------------------------------------------------------ 4: never silently wrong or slow


def gathers_are_counted(mesh) -> list[str]:
    import warnings

    x = sharded(numbers(8, 2), mesh, 0).requires_grad_()
    with warnings.catch_warnings(record=True) as caught, shardfield.report() as report:
        warnings.simplefilter("always")
        y = torch.histc(x.detach(), 3)
        torch.histc(x.detach(), 3)
    assert not is_sharded(y)
    assert sum(report.fallbacks.values()) == 2
    texts = [str(w.message) for w in caught if "histc" in str(w.message)]
    assert len(texts) <= 1, "warned about once"
    return texts


def test_law_4_gathers_are_counted_and_warned_about_once(run_mesh):
    run_mesh((2,), gathers_are_counted)


# -------------------------------------------------------------------------- 5: it is a torch.Tensor


def modules_see_a_tensor(mesh) -> None:
    seen = []

    class Look(nn.Module):
        def forward(self, x):
            seen.append((type(x), tuple(x.shape), x.device.type, x.stride()))
            return x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2) + x

    x = numbers(2, 2, 8, 10)
    model = nn.Sequential(net(), Look())
    y = model(sharded(x, mesh, 2))
    assert seen == [(torch.Tensor, (2, 2, 8, 10), mesh.device_type, (160, 80, 10, 1))]
    assert_equal(y, model(x), "output")


def test_law_5_modules_see_an_ordinary_tensor(run_mesh, ranks):
    run_mesh((ranks,), modules_see_a_tensor)


# --------------------------------------------------------- 6: no communication where none is needed


def one_rank_is_silent(mesh) -> None:
    x = sharded(numbers(2, 2, 8, 10), mesh, 2).requires_grad_()
    model = net()
    with shardfield.report() as report:
        (model(x) ** 2).mean().backward()
    assert report.bytes_sent == 0


def test_law_6_one_rank_sends_nothing(run_mesh):
    run_mesh((1,), one_rank_is_silent)


# ----------------------------------------------------------- training over data x domain, ten steps


STEPS = 10


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    return numbers(STEPS, 4, 2, 8, 10, seed=1), numbers(STEPS, 4, 2, 8, 10, seed=2)


def train_serially(model: nn.Module) -> list[float]:
    x, t = samples()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x[step]), t[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_two_axes(model: nn.Module, parameters, mesh) -> list[float]:
    x, t = samples()
    data = mesh.get_local_rank("data")
    optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        rows = slice(2 * data, 2 * data + 2)
        ours = shard_tensor(x[step, rows], mesh["domain"], [Shard(2)])
        target = shard_tensor(t[step, rows], mesh["domain"], [Shard(2)])
        loss = F.mse_loss(model(ours), target)
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mesh["data"].get_group())
        losses.append(mean.item() / 2)
    return losses


def ddp_training() -> None:
    mesh = mesh_of((2, 2), ("data", "domain"))
    serial, ours = net(), net()
    want = train_serially(serial)
    sync_module_over_mesh(ours, mesh["domain"])
    model = nn.parallel.DistributedDataParallel(ours, process_group=mesh["data"].get_group())
    got = train_on_two_axes(model, model.parameters(), mesh)
    assert got == pytest.approx(want, rel=1e-9)
    for (name, p), q in zip(ours.named_parameters(), serial.named_parameters(), strict=True):
        assert_equal(p, q[1], name)


def test_ddp_over_the_data_axis_equals_serial_for_ten_steps(run_ranks):
    run_ranks(4, ddp_training)


def fsdp_training() -> None:
    from torch.distributed.fsdp import fully_shard

    mesh = mesh_of((2, 2), ("data", "domain"))
    serial, ours = net(), net()
    want = train_serially(serial)
    for layer in ours:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh["data"])
    fully_shard(ours, mesh=mesh["data"])
    got = train_on_two_axes(ours, ours.parameters(), mesh)
    assert got == pytest.approx(want, rel=1e-9)
    for (name, p), q in zip(ours.named_parameters(), serial.named_parameters(), strict=True):
        assert_equal(p.full_tensor(), q[1], name)


def test_fsdp2_over_the_data_axis_equals_serial_for_ten_steps(run_ranks):
    run_ranks(4, fsdp_training)


def domain_training(mesh) -> None:
    serial, ours = net(), net()
    want = train_serially(serial)
    x, t = samples()
    placements = [Shard(2)] if mesh.ndim == 1 else [Shard(2), Shard(3)]
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = F.mse_loss(ours(shard_tensor(x[step], mesh, placements)), t[step])
        loss.backward()
        optimizer.step()
        assert loss.item() == pytest.approx(want[step], rel=1e-9)
    for (name, p), q in zip(ours.named_parameters(), serial.named_parameters(), strict=True):
        assert_equal(p, q[1], name)


def test_training_over_the_domain_equals_serial_for_ten_steps(run_mesh, mesh_shape):
    run_mesh(mesh_shape, domain_training)


def handlers_port_unchanged(mesh) -> None:
    """A handler written for the Python peer runs with only its import changed."""

    def sharded_dot(func, types, args, kwargs):
        x, y = args[0], args[1]
        group = x._spec.mesh.get_group()
        part = func(x.to_local(), y.to_local())
        dist.all_reduce(part, group=group)
        assert x._spec.placements[0].is_shard()
        return ShardTensor.from_local(part, x._spec.mesh, (Replicate(),))

    ShardTensor.register_function_handler(torch.inner, sharded_dot)
    a, b = sharded(numbers(9), mesh, 0), sharded(numbers(9, seed=1), mesh, 0)
    assert_equal(torch.inner(a, b), torch.inner(numbers(9), numbers(9, seed=1)), "inner")


def test_handlers_of_the_python_peer_port_unchanged(run_mesh):
    run_mesh((2,), handlers_port_unchanged)


def twice_differentiable(mesh) -> None:
    """A gradient penalty through the whole net, and a physics-style loss on second derivatives."""
    model = net()
    serial = copy.deepcopy(model)
    results = []
    for m, x in ((serial, numbers(1, 2, 8, 10)), (model, sharded(numbers(1, 2, 8, 10), mesh, 2))):
        x = x.detach().requires_grad_()
        (g,) = torch.autograd.grad(m(x).sin().sum(), x, create_graph=True)
        (h,) = torch.autograd.grad((g * g).sum(), x, create_graph=True)
        loss = (h * h).mean() + g.mean()
        loss.backward()
        results.append([loss, x.grad, *(p.grad for p in m.parameters())])
    for i, (want, got) in enumerate(zip(*results, strict=True)):
        if want is None:
            assert got is None or not full(got).any()
        else:
            assert_equal(got, want, f"result {i}", rtol=1e-8, atol=1e-9)


def test_law_5_third_derivatives(run_mesh):
    run_mesh((1,), twice_differentiable)
    run_mesh((3,), twice_differentiable)
