"""Data parallel wrappers beside a domain axis: 20 steps of training equal the serial ones.

The batch is split over the data axes, each sample over the domain axes. Losses of every step and the
final parameters are compared with one process that has the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from oracle import assert_equal, numbers
from rank_pool import mesh_of
from shardfield.domain_parallel import shard_tensor, sync_module_over_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import get_ema_multi_avg_fn

STEPS = 20
BATCH = 4


class Net(nn.Module):
    """Convolutions, a norm and linear layers on the channels; (b, 2, h, w) to (b, h, w, 2)."""

    def __init__(self, unused: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.mix = nn.Conv2d(2, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)
        self.up = nn.Linear(6, 8)
        self.down = nn.Linear(8, 2)
        if unused:
            self.spare = nn.Linear(3, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.mix(x)))
        return self.down(F.silu(self.up(x.permute(0, 2, 3, 1))))


@dataclass
class Recipe:
    """What is done to the parameters, alike in the serial and in the parallel run."""

    optimizers: Callable[[nn.Module], list[torch.optim.Optimizer]]
    schedulers: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float | None = None
    accumulate: int = 1
    ema: bool = False


def sgd(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)]


class OrthogonalMomentum(torch.optim.Optimizer):
    """Muon's step (Jordan 2024, https://kellerjordan.github.io/posts/muon/) in the parameters' own dtype:
    torch.optim.Muon orthogonalises in bfloat16, which no run repeats to 1e-9 on other pieces.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float, momentum: float = 0.95):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        """One step; matrices that are DTensors stay cut."""
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("momentum", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                p.add_(orthogonal(p.grad.lerp(m, group["momentum"])), alpha=-group["lr"])


def orthogonal(x: torch.Tensor) -> torch.Tensor:
    """Five Newton-Schulz steps of the odd polynomial that Muon uses, on a wide matrix."""
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    x = x / (x.norm() + 1e-12)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if tall else x


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.dim() == 2]


def with_adamw(first: torch.optim.Optimizer, model: nn.Module) -> list[torch.optim.Optimizer]:
    """Another optimizer for the matrices, AdamW for the rest."""
    rest = [p for p in model.parameters() if p.dim() != 2]
    return [first, torch.optim.AdamW(rest, lr=0.02)]


def muon(model: nn.Module) -> list[torch.optim.Optimizer]:
    return with_adamw(torch.optim.Muon(matrices(model), lr=0.02), model)


def orthogonal_momentum(model: nn.Module) -> list[torch.optim.Optimizer]:
    return with_adamw(OrthogonalMomentum(matrices(model), lr=0.02), model)


def cosine(optimizer: torch.optim.Optimizer) -> Any:
    warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.2, total_iters=5)
    cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS - 5)
    return torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [5])


RECIPES = {
    "sgd": Recipe(sgd),
    "adamw, schedule, clip, ema": Recipe(adamw, cosine, clip=0.05, ema=True),
    "muon": Recipe(muon, cosine),
    "muon in float64": Recipe(orthogonal_momentum, cosine, clip=0.05),
    "accumulated, clipped": Recipe(sgd, clip=0.05, accumulate=2),
}


@dataclass
class Part:
    """This rank's part of the batch and of each sample; the serial run has all of both."""

    rows: slice = field(default_factory=lambda: slice(None))
    cut: Callable[[torch.Tensor, int], torch.Tensor] = lambda x, first_dim: x
    data_ranks: int = 1


def averaged(value: torch.Tensor, part: Part, mesh: Any) -> float:
    """The mean of the data ranks' losses; equal on all ranks of a domain."""
    total = value.detach().clone()
    if part.data_ranks > 1:
        for axis in [a for a in mesh.mesh_dim_names if a in ("replicate", "data")]:
            dist.all_reduce(total, group=mesh[axis].get_group())
    return float(total) / part.data_ranks


def fit(model: nn.Module, recipe: Recipe, part: Part, mesh: Any = None) -> tuple[list[float], list]:
    """Trains; returns the losses, and the averaged parameters if the recipe keeps them."""
    average = get_ema_multi_avg_fn(0.9)
    optimizers = recipe.optimizers(model)
    schedulers = [recipe.schedulers(o) for o in optimizers] if recipe.schedulers else []
    ema = [p.detach().clone() for p in model.parameters()] if recipe.ema else []
    x = numbers(STEPS, BATCH, 2, 8, 6, seed=1)
    t = x.permute(0, 1, 3, 4, 2).tanh()
    losses = []
    for step in range(STEPS):
        xs, ts = x[step, part.rows], t[step, part.rows]
        loss_sum = torch.zeros((), dtype=torch.float64)
        pieces = list(zip(xs.chunk(recipe.accumulate), ts.chunk(recipe.accumulate), strict=True))
        for i, (a, b) in enumerate(pieces):
            last = i == len(pieces) - 1
            quiet = not last and isinstance(model, DistributedDataParallel)
            with model.no_sync() if quiet else contextlib.nullcontext():
                if hasattr(model, "set_requires_gradient_sync"):
                    model.set_requires_gradient_sync(last)
                loss = F.mse_loss(model(part.cut(a, 2)), part.cut(b, 1)) / len(pieces)
                loss.backward()
            loss_sum += loss.detach()
        if recipe.clip:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for scheduler in schedulers:
            scheduler.step()
        if ema:
            average(ema, [p.detach() for p in model.parameters()], 0)
        losses.append(averaged(loss_sum, part, mesh))
    return losses, ema


def part_of(mesh: Any) -> Part:
    """Data axes are replicate and data; "other" is a single rank's; the rest cut height and width."""
    names = mesh.mesh_dim_names
    data = [a for a in names if a in ("replicate", "data")]
    domain = [a for a in names if a not in (*data, "other")]
    ranks, place = 1, 0
    for a in data:
        ranks, place = ranks * mesh[a].size(), place * mesh[a].size() + mesh.get_local_rank(a)
    each = BATCH // ranks

    def cut(x: torch.Tensor, first_dim: int) -> torch.Tensor:
        placements = [Shard(first_dim + i) for i in range(len(domain))]
        return shard_tensor(x, mesh[tuple(domain)] if domain else mesh, placements)

    return Part(slice(place * each, (place + 1) * each), cut, ranks)


def wrapped(model: nn.Module, wrapper: str, mesh: Any, unused: bool) -> nn.Module:
    if wrapper == "ddp":
        group = mesh["data"].get_group()
        return DistributedDataParallel(model, process_group=group, find_unused_parameters=unused)
    if wrapper == "hsdp":
        data = mesh["replicate", "data"]
    else:
        data = mesh["data"]
    for layer in (model.mix, model.up, model.down, model):
        fully_shard(layer, mesh=data)
    return model


def whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def trains_like_serial(
    shape: tuple[int, ...], names: tuple[str, ...], wrapper: str, recipe: str, unused: bool = False
) -> None:
    mesh = mesh_of(shape, names)
    serial, ours = Net(unused), Net(unused)
    want, want_ema = fit(serial, RECIPES[recipe], Part())
    domain = tuple(a for a in names if a not in ("replicate", "data", "other"))
    sync_module_over_mesh(ours, mesh[domain])
    got, ema = fit(wrapped(ours, wrapper, mesh, unused), RECIPES[recipe], part_of(mesh), mesh)
    assert got == pytest.approx(want, rel=1e-9)
    assert want[-1] < 0.9 * want[0]
    for (name, p), q in zip(ours.named_parameters(), serial.parameters(), strict=True):
        assert_equal(whole(p.detach()), q, name, 1e-7, 1e-9)
    for p, q in zip(ema, want_ema, strict=True):
        assert_equal(whole(p), q, "average of the parameters", 1e-7, 1e-9)


MESHES = {
    "data, domain": ((2, 2), ("data", "domain")),
    "data, height, width": ((2, 2, 2), ("data", "height", "width")),
    "replicate, data, domain": ((2, 2, 2), ("replicate", "data", "domain")),
    "replicate, data, height, width": ((2, 1, 2, 2), ("replicate", "data", "height", "width")),
    "other, data, height, width": ((1, 2, 2, 2), ("other", "data", "height", "width")),
}


def run(run_ranks: Callable[..., Any], mesh: str, **more: Any) -> None:
    shape, names = MESHES[mesh]
    ranks = 1
    for n in shape:
        ranks *= n
    run_ranks(ranks, trains_like_serial, shape=shape, names=names, **more)


# torch.optim.Muon rounds to bfloat16 between products: on cut matrices in another order.
PAIRS = [("ddp", r) for r in RECIPES] + [("fsdp", r) for r in RECIPES if r != "muon"]


@pytest.mark.parametrize(("wrapper", "recipe"), PAIRS)
def test_two_axes(run_ranks, wrapper, recipe):
    run(run_ranks, "data, domain", wrapper=wrapper, recipe=recipe)


def test_unused_parameters(run_ranks):
    run(run_ranks, "data, domain", wrapper="ddp", recipe="adamw, schedule, clip, ema", unused=True)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
@pytest.mark.parametrize("mesh", ["data, height, width", "other, data, height, width"])
def test_three_and_four_axes(run_ranks, mesh, wrapper):
    run(run_ranks, mesh, wrapper=wrapper, recipe="accumulated, clipped")


@pytest.mark.parametrize("mesh", [m for m in MESHES if m.startswith("replicate")])
def test_hybrid_sharding_on_three_and_four_axes(run_ranks, mesh):
    run(run_ranks, mesh, wrapper="hsdp", recipe="adamw, schedule, clip, ema")
