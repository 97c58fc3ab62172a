"""The laws of the design, one by one, and training over the data axis of a 2 x 2 mesh."""

from __future__ import annotations

import copy
import itertools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import assert_equal, check_same_as_serial, full, is_sharded, numbers, sharded
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


def positional_embedding(mesh) -> None:
    check_same_as_serial(
        lambda x, e: x + e,
        [numbers(2, 9, 4)],
        mesh,
        [Shard(1)],
        plain=[numbers(1, 9, 4, seed=1)],
        output_sharded=True,
    )
    check_same_as_serial(
        lambda x, e: torch.cat([x * e, e.expand(2, 9, 4)], 2),
        [numbers(2, 9, 4)],
        mesh,
        [Shard(1)],
        plain=[numbers(1, 9, 4, seed=1)],
    )


def test_law_1_plain_operand_that_is_full_size_along_the_cut(run_mesh, ranks):
    run_mesh((ranks,), positional_embedding)


# --------------------------------------------------------- 2: gradients of plain tensors are serial


def plain_gradients(mesh, placements) -> None:
    check_same_as_serial(net(), [numbers(2, 2, 8, 10)], mesh, placements, second=True)


def test_law_2_and_3_gradients_are_plain_full_and_serial(run_mesh, mesh_shape):
    cuts = [[Shard(2)], [Shard(3)]] if len(mesh_shape) == 1 else [[Shard(2), Shard(3)]]
    for placements in cuts:
        run_mesh(mesh_shape, plain_gradients, placements=placements)


def summed_again(mesh) -> list[str]:
    w = nn.Parameter(numbers(3, 3))
    (sharded(numbers(6, 3), mesh, 0) @ w).sum().backward()
    model = nn.Linear(3, 2).double()
    texts = []
    with pytest.raises(RuntimeError) as caught:
        wrapped = nn.parallel.DistributedDataParallel(model, process_group=mesh.get_group())
        wrapped(sharded(numbers(6, 3), mesh, 0)).sum().backward()
    texts.append(str(caught.value))
    return texts


def test_law_2_a_second_sum_over_the_domain_axis_is_refused(run_mesh):
    (text,) = run_mesh((2,), summed_again)[0]
    assert "data" in text or "domain" in text or "already" in text, text


# ------------------------------------------------------------------ 4: never silently wrong or slow


def gathers_are_counted(mesh) -> list[str]:
    import warnings

    x = sharded(numbers(8, 2), mesh, 0).requires_grad_()
    with warnings.catch_warnings(record=True) as caught, shardfield.report() as report:
        warnings.simplefilter("always")
        y = torch.unique_consecutive(x.detach())
        torch.unique_consecutive(x.detach())
    assert not is_sharded(y)
    assert sum(report.fallbacks.values()) == 2
    texts = [str(w.message) for w in caught if "unique_consecutive" in str(w.message)]
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


def silent_operators(mesh) -> None:
    x = sharded(numbers(2, 4, 12), mesh, 2).requires_grad_()
    layer = nn.Conv1d(4, 4, 1).double()
    norm = nn.LayerNorm(4).double()
    calls = [
        lambda t: F.gelu(t) + 1,
        lambda t: t * t - t / 2,
        lambda t: t.transpose(1, 2),
        lambda t: t[:, 1:3].unsqueeze(0),
        lambda t: norm(t.transpose(1, 2)),
        lambda t: F.linear(t.transpose(1, 2), layer.weight[:, :, 0]),
        layer,
        lambda t: t.sum(1),
        lambda t: t.softmax(1),
        lambda t: F.avg_pool1d(t.transpose(1, 2).transpose(1, 2), 1),
        lambda t: t.flatten(0, 1),
        lambda t: F.dropout(t, 0.0),
        lambda t: t.expand(2, 4, 12).clone(),
        lambda t: F.pad(t, (0, 0, 1, 1)),
    ]
    for i, call in enumerate(calls):
        with torch.no_grad(), shardfield.report() as report:
            y = call(x)
        assert is_sharded(y), i
        assert report.bytes_sent == 0, f"call {i} sent {report.bytes_sent} bytes"


def test_law_6_no_communication_where_none_is_needed(run_mesh):
    for ranks in (1, 2, 4):
        run_mesh((ranks,), silent_operators)


def one_rank_is_silent(mesh) -> None:
    x = sharded(numbers(2, 2, 8, 10), mesh, 2).requires_grad_()
    model = net()
    with shardfield.report() as report:
        (model(x) ** 2).mean().backward()
    assert report.bytes_sent == 0


def test_law_6_one_rank_sends_nothing(run_mesh):
    run_mesh((1,), one_rank_is_silent)


LIMIT_CASES = {
    "k3s1": (3, 1, 1, 1),
    "k3s2": (3, 2, 1, 1),
    "k4s2": (4, 2, 1, 1),
    "k7s2": (7, 2, 3, 1),
    "k5d2": (5, 1, 4, 2),
    "k2s2": (2, 2, 0, 1),
}


def least_rows(border: int, k: int, s: int, p: int, d: int) -> int:
    """Rows that must pass an input border, with the output border where that is fewest."""
    return min(
        max(0, (o - 1) * s - p + d * (k - 1) + 1 - border) + max(0, border - (o * s - p))
        for o in range(border + p + 1)
    )


def bytes_of_a_convolution(mesh, name: str, sizes: list[int] | None) -> list[int]:
    k, s, p, d = LIMIT_CASES[name]
    x = sharded(numbers(1, 2, 48, 3), mesh, 2, sizes)
    w = numbers(4, 2, k, 1, seed=1)
    with torch.no_grad(), shardfield.report() as report:
        y = F.conv2d(x, w, stride=(s, 1), padding=(p, 0), dilation=(d, 1))
    want = F.conv2d(numbers(1, 2, 48, 3), w, stride=(s, 1), padding=(p, 0), dilation=(d, 1))
    assert_equal(y, want, name)
    pieces = sizes or [48 // mesh.size()] * mesh.size()
    rows = sum(least_rows(b, k, s, p, d) for b in itertools.accumulate(pieces[:-1]))
    return [report.bytes_sent, rows * 2 * 3 * 8]


@pytest.mark.parametrize("name", LIMIT_CASES)
def test_law_6_bytes_of_a_convolution_are_the_least_possible(run_mesh, name):
    for ranks, sizes in ((2, None), (3, None), (4, None), (2, [25, 23]), (3, [17, 15, 16])):
        results = run_mesh((ranks,), bytes_of_a_convolution, name=name, sizes=sizes)
        sent, limit = sum(r[0] for r in results), results[0][1]
        assert sent == limit, f"{ranks} ranks {sizes}: {sent} bytes, limit {limit}"


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

    plain = torch.inner
    handle = ShardTensor.register_function_handler(torch.inner, sharded_dot)
    a, b = sharded(numbers(9), mesh, 0), sharded(numbers(9, seed=1), mesh, 0)
    assert_equal(torch.inner(a, b), torch.inner(numbers(9), numbers(9, seed=1)), "inner")
    handle.remove()
    assert torch.inner is plain


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
