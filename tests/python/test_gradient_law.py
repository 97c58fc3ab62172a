"""Law 2: gradients of plain tensors are summed over the domain once; a second sum is refused."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from oracle import assert_equal, chunk_sizes, numbers, sharded
from rank_pool import mesh_of
from shardfield.distributed import fused_all_reduce, mark_module_as_shared, reduce_loss
from shardfield.domain_parallel import shard_tensor
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv1d(2, 4, 3, padding=1),
        nn.GELU(),
        nn.GroupNorm(2, 4),
        nn.Conv1d(4, 2, 5, padding=2),
    ).double()


def serial_gradients() -> list[torch.Tensor]:
    model = net()
    F.mse_loss(model(numbers(2, 2, 12)), numbers(2, 2, 12, seed=1)).backward()
    return [p.grad for p in model.parameters()]


def backward_on(mesh, model: nn.Module) -> None:
    """One backward with the last axis of `mesh` as domain, all other axes replicated."""
    x, t = sharded(numbers(2, 2, 12), mesh, 2), sharded(numbers(2, 2, 12, seed=1), mesh, 2)
    F.mse_loss(model(x), t).backward()


def assert_serial(model: nn.Module) -> None:
    for p, want in zip(model.parameters(), serial_gradients(), strict=True):
        assert_equal(p.grad, want, "gradient")


class ScattersItself(nn.Module):
    """Takes plain input, so that nobody outside sees a sharded tensor."""

    def __init__(self, model: nn.Module, mesh):
        super().__init__()
        self.model, self.mesh = model, mesh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(sharded(x, self.mesh, 2)).square().mean()


# ------------------------------------------------------------------------------- sums by hand


def sums_by_hand(mesh) -> str:
    model = net()
    backward_on(mesh, model)
    group = mesh.get_group(mesh.ndim - 1)
    ways = {
        "allreduce_": lambda g: dist.all_reduce(g, group=group),
        "reduce_": lambda g: (
            dist.reduce(g, 0, group=group, group_dst=None)
            if mesh.ndim == 1
            else dist.reduce(g, group_dst=0, group=group)
        ),
        "_reduce_scatter_base_": lambda g: dist.reduce_scatter_tensor(
            torch.empty(g.numel() // group.size()), g.reshape(-1), group=group
        ),
        "allreduce_coalesced_": lambda g: dist.all_reduce_coalesced([g], group=group),
        "_c10d_functional::all_reduce": lambda g: funcol.all_reduce(g, "sum", group),
        "_c10d_functional::all_reduce_coalesced": lambda g: funcol.all_reduce_coalesced(
            [g], "sum", group
        ),
        "reduce_scatter_tensor_coalesced_": lambda g: funcol.reduce_scatter_tensor(
            g.reshape(-1), "sum", 0, group
        ),
        "fused_all_reduce": lambda g: fused_all_reduce(g, group=group),
    }
    weight = model[0].weight
    for name, call in ways.items():
        with pytest.raises(RuntimeError, match=f"{name}: expected a gradient that is still") as e:
            call(weight.grad)
        text = str(e.value)
        assert f"{group.size()} times too large" in text and "mesh['data']" in text, text
    fused_all_reduce(weight.grad, op=dist.ReduceOp.AVG, group=group)  # of equal values: harmless
    dist.all_reduce(weight.grad, op=dist.ReduceOp.MAX, group=group)
    dist.all_reduce(weight.grad.clone(), group=group)  # no longer the gradient itself
    assert_serial(model)
    return text


@pytest.mark.parametrize("shape", [(2,), (3,), (4,), (2, 2), (1, 1, 3), (1, 2, 1, 2)], ids=str)
def test_a_sum_by_hand_over_the_domain_is_refused(run_mesh, shape):
    for text in run_mesh(shape, sums_by_hand):
        assert "on rank" in text


def sums_over_the_data_axis(mesh) -> None:
    model = net()
    backward_on(mesh, model)
    group = mesh.get_group(0)
    for p in model.parameters():
        dist.all_reduce(p.grad, group=group)
        p.grad /= group.size()
    assert_serial(model)
    with pytest.raises(RuntimeError, match="times too large"):  # all ranks: data and domain
        dist.all_reduce(model[0].weight.grad)


def test_a_sum_by_hand_over_the_data_axis_passes(run_mesh):
    for shape in [(2, 2), (2, 1, 2)]:
        run_mesh(shape, sums_over_the_data_axis)


def weights_behind_casts(mesh) -> None:
    """Autocast, tied weights and parametrizations hand the sum on through other memory."""
    tied = nn.Linear(4, 4)
    for bf16 in (False, True):
        tied.zero_grad()
        with torch.autocast("cpu", enabled=bf16):
            y = tied(tied(sharded(numbers(6, 4, dtype=torch.float32), mesh, 0)).tanh())
        y.float().square().mean().backward()
        for p in tied.parameters():
            with pytest.raises(RuntimeError, match="still to be summed"):
                dist.all_reduce(p.grad, group=mesh.get_group())


def test_sums_behind_casts_are_recognised(run_mesh):
    run_mesh((2,), weights_behind_casts)


class GathersGradients(nn.Module):
    """Weights whose gradients come together by a gather: cut as the tensor is, or of cut norms."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(numbers(1, 4, 12))
        self.group_norm, self.layer_norm = nn.GroupNorm(2, 4), nn.LayerNorm(12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer_norm(self.group_norm(x + self.position))


def gathered_gradients(mesh) -> None:
    model, serial = GathersGradients().double(), GathersGradients().double()
    model(sharded(numbers(2, 4, 12), mesh, 2)).square().sum().backward()
    serial(numbers(2, 4, 12)).square().sum().backward()
    for (name, p), q in zip(model.named_parameters(), serial.parameters(), strict=True):
        assert_equal(p.grad, q.grad, name)
        with pytest.raises(RuntimeError, match="still to be summed"):
            dist.all_reduce(p.grad, group=mesh.get_group())
        assert_equal(p.grad, q.grad, name)


def test_sums_of_gathered_gradients_are_refused(run_mesh):
    for ranks in (2, 3):
        run_mesh((ranks,), gathered_gradients)


def gradients_of_a_ranks_own(mesh) -> None:
    """The same module used on a rank's own tensors: its gradients are the rank's, and may be summed."""
    model = net()
    backward_on(mesh, model)
    rank, n = mesh.get_local_rank(), mesh.size()
    model.zero_grad()
    for p in model.parameters():  # the gradient's memory stays the same
        p.grad = torch.zeros_like(p)
    model(numbers(2, 2, 12, seed=rank)).square().mean().backward()
    serial = net()
    torch.stack(
        [serial(numbers(2, 2, 12, seed=r)).square().mean() for r in range(n)]
    ).sum().backward()
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        dist.all_reduce(p.grad, group=mesh.get_group())
        assert_equal(p.grad, q.grad, "data parallel by hand")


def test_gradients_of_a_ranks_own_may_be_summed(run_mesh, ranks):
    run_mesh((ranks,), gradients_of_a_ranks_own)


def shared_module(mesh) -> None:
    model = mark_module_as_shared(net(), mesh)
    with pytest.raises(RuntimeError, match="already; summed over the group"):
        backward_on(mesh, model)


def test_a_shared_module_on_sharded_tensors_is_refused(run_mesh):
    run_mesh((3,), shared_module)


# --------------------------------------------------------------------------------------- wrappers


def sum_hook(_state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda f: f.value()[0])


def ddp_over_the_domain(mesh) -> None:
    for inside, hook, view in (
        (False, None, False),
        (True, None, False),
        (True, sum_hook, False),
        (True, None, True),
    ):
        model = nn.parallel.DistributedDataParallel(
            ScattersItself(net(), mesh) if inside else net(),
            process_group=mesh.get_group(),
            gradient_as_bucket_view=view,
        )
        if hook:
            model.register_comm_hook(None, hook)
        x = numbers(2, 2, 12)
        with pytest.raises(RuntimeError, match=r"of one domain.*data axis only"):
            model(x if inside else sharded(x, mesh, 2)).mean().backward()


def test_ddp_over_the_domain_is_refused(run_mesh):
    for ranks in (2, 4):
        run_mesh((ranks,), ddp_over_the_domain)


def ddp_over_all_axes() -> None:
    mesh = mesh_of((2, 2), ("data", "domain"))
    model = nn.parallel.DistributedDataParallel(ScattersItself(net(), mesh["domain"]))
    with pytest.raises(RuntimeError, match="of one domain"):
        model(numbers(2, 2, 12)).backward()


def test_ddp_over_data_and_domain_is_refused(run_ranks):
    run_ranks(4, ddp_over_all_axes)


def fsdp_over_the_domain(mesh, factor: float | None) -> None:
    model = net()
    for layer in (model[0], model[3], model):
        fully_shard(layer, mesh=mesh)
        if factor is not None:
            layer.set_gradient_divide_factor(factor)
    backward_on(mesh, model)
    for p, want in zip(model.parameters(), serial_gradients(), strict=True):
        assert_equal(p.grad.full_tensor(), want, "average of equals")


def test_fsdp2_over_the_domain_averages_equal_values(run_mesh):
    for ranks in (2, 3):
        run_mesh((ranks,), fsdp_over_the_domain, factor=None)
    run_mesh((2,), fsdp_over_the_domain, factor=2.0)


def fsdp_that_adds_up(mesh) -> None:
    with pytest.raises(RuntimeError, match=r"set_gradient_divide_factor\(1.0\).*added 2 times"):
        fsdp_over_the_domain(mesh, 1.0)


def test_fsdp2_that_adds_up_over_the_domain_is_refused(run_mesh):
    run_mesh((2,), fsdp_that_adds_up)


# ----------------------------------------------------------------------------------------- losses


def loss_reduced_again(mesh) -> None:
    model = net()
    x = sharded(numbers(2, 2, 12), mesh, 2)
    loss = F.mse_loss(model(x), numbers(2, 2, 12, seed=1))
    for mean in (True, False):
        with pytest.raises(RuntimeError, match="reduced over the domain already and equal"):
            reduce_loss(loss, mean=mean, group=mesh)
    logged = reduce_loss(loss.item(), group=mesh)
    assert logged == (pytest.approx(loss.item()) if mesh.get_local_rank() == 0 else None)
    loss.backward()
    assert_serial(model)


def test_a_sharded_loss_is_not_reduced_again(run_mesh):
    for ranks in (2, 3, 4):
        run_mesh((ranks,), loss_reduced_again)


def loss_over_the_data_axis() -> None:
    """The mean over samples with gradient: every data rank has a loss of its own."""
    mesh = mesh_of((2, 2), ("data", "domain"))
    model = net()
    sample = numbers(2, 2, 12, seed=mesh.get_local_rank("data"))
    loss = model(shard_tensor(sample, mesh["domain"], [Shard(2)])).square().mean()
    mean = reduce_loss(loss, group=mesh["data"])
    (mean if mean.numel() else mean.sum()).sum().backward()
    for p in model.parameters():
        dist.all_reduce(p.grad, group=mesh["data"].get_group())
    serial = net()
    torch.stack(
        [serial(numbers(2, 2, 12, seed=i)).square().mean() for i in (0, 1)]
    ).mean().backward()
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        assert_equal(p.grad, q.grad, "gradient")


def test_a_loss_is_reduced_over_the_data_axis_with_gradient(run_ranks):
    run_ranks(4, loss_over_the_data_axis)


LOSSES = {"mse": F.mse_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss}


def losses_of_the_peers(mesh, name: str) -> None:
    """Elsewhere their gradient is the serial one times the number of ranks."""
    n = mesh.size()
    for sizes in (chunk_sizes(12, n), [12 - (n - 1)] + [1] * (n - 1)):
        w = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
        v = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
        x, t = numbers(3, 2, 12), numbers(3, 2, 12, seed=1)
        LOSSES[name](w * sharded(x, mesh, 2, sizes), sharded(t, mesh, 2, sizes)).backward()
        LOSSES[name](v * x, t).backward()
        assert_equal(w.grad, v.grad, name)


@pytest.mark.parametrize("name", LOSSES)
def test_losses_that_elsewhere_count_every_rank(run_mesh, ranks, name):
    run_mesh((ranks,), losses_of_the_peers, name=name)


def partial_loss(mesh) -> None:
    """A rank's own part of a loss: the sum over ranks is the loss, its gradient is not summed again."""
    model = net()
    y = model(sharded(numbers(2, 2, 12), mesh, 2))
    part = y.to_local().square().sum() / y.numel()
    total = fused_all_reduce(part.detach(), group=mesh)
    assert torch.allclose(total, y.detach().square().mean())
    part.backward()
    serial = net()
    serial(numbers(2, 2, 12)).square().mean().backward()
    for p, q in zip(model.parameters(), serial.parameters(), strict=True):
        assert_equal(p.grad, q.grad, "gradient of the parts")


def test_a_ranks_own_part_of_a_loss(run_mesh, ranks):
    run_mesh((ranks,), partial_loss)
