"""Losses: value and gradient are the serial ones for any cut, uneven or empty."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, check_same_as_serial, is_sharded, numbers, scatter, sharded
from torch import Tensor
from torch.distributed.tensor import Shard

REDUCTIONS = ("mean", "sum", "none")
SHAPE = (2, 4, 7, 3)


def target(*shape: int) -> Tensor:
    return numbers(*shape, seed=7).sigmoid()


ELEMENTWISE = {
    "mse": F.mse_loss,
    "l1": F.l1_loss,
    "smooth_l1": lambda x, t, reduction: F.smooth_l1_loss(x, t, reduction=reduction, beta=0.7),
    "huber": lambda x, t, reduction: F.huber_loss(x, t, reduction=reduction, delta=0.6),
    "soft_margin": lambda x, t, reduction: F.soft_margin_loss(
        x, (t - 0.5).sign(), reduction=reduction
    ),
    "kl_div": lambda x, t, reduction: F.kl_div(x.log_softmax(1), t, reduction=reduction),
    "bce": lambda x, t, reduction: F.binary_cross_entropy(
        x.sigmoid(), t, numbers(7, 3).square(), reduction=reduction
    ),
    "bce_with_logits": lambda x, t, reduction: F.binary_cross_entropy_with_logits(
        x, t, numbers(7, 1).square(), reduction=reduction, pos_weight=numbers(3).square()
    ),
    "poisson_nll": lambda x, t, reduction: F.poisson_nll_loss(x, t, reduction=reduction),
    "gaussian_nll": lambda x, t, reduction: F.gaussian_nll_loss(x, t, t + 0.1, reduction=reduction),
}


def elementwise(
    mesh, dims: tuple[int, ...], cut_target: bool, sizes: list[int] | None = None
) -> None:
    shape = list(SHAPE)
    if sizes:
        shape[dims[0]] = sum(sizes)
    t = target(*shape)
    placed = [Shard(d) for d in dims]
    lengths = {0: sizes} if sizes else {}
    targets = scatter(Cut(t, placed, lengths), mesh) if cut_target else t
    for name, loss in ELEMENTWISE.items():
        for reduction in REDUCTIONS:
            if cut_target and name == "gaussian_nll":
                continue  # its value check of the variance is Python's own and gathers a bool
            try:
                check_same_as_serial(
                    lambda x, f=loss, r=reduction: f(
                        x, targets if is_sharded(x) else t, reduction=r
                    ),
                    [Cut(numbers(*shape), placed, lengths)],
                    mesh,
                    output_sharded=reduction == "none",
                )
            except AssertionError as error:
                raise AssertionError(f"{name} {reduction} cut on {dims}: {error}") from error


@pytest.mark.parametrize("dim", range(4))
def test_elementwise_losses(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, elementwise, dims=(dim,) * len(mesh_shape), cut_target=dim % 2 == 0)


def test_elementwise_losses_on_two_dims(run_mesh):
    run_mesh((2, 2), elementwise, dims=(0, 2), cut_target=True)


@pytest.mark.parametrize("sizes", [[1, 6, 0], [0, 0, 7]])
def test_elementwise_losses_of_uneven_pieces(run_mesh, sizes):
    run_mesh((3,), elementwise, dims=(2,), cut_target=True, sizes=sizes)


def gradient_ratios(mesh, name: str, sizes: list[int]) -> list[float]:
    """Value and gradient over the serial ones: other systems return the rank count here."""
    t, x = target(1, 1, sum(sizes)), numbers(1, 1, sum(sizes))
    function = {"mse": F.mse_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss}[name]
    leaf = x.clone().requires_grad_()
    want = function(leaf, t)
    want.backward()
    ours = sharded(x, mesh, 2, sizes).requires_grad_()
    loss = function(ours, sharded(t, mesh, 2, sizes))
    loss.backward()
    ratio = ours.grad.full_tensor() / leaf.grad
    return [float(loss / want), float(ratio.min()), float(ratio.max())]


@pytest.mark.parametrize("sizes", [[5, 5], [6, 3], [4, 3, 3], [9, 0, 1, 2]])
@pytest.mark.parametrize("name", ["mse", "smooth_l1", "huber"])
def test_finding_1_loss_gradients_are_serial(run_mesh, name, sizes):
    for ratios in run_mesh((len(sizes),), gradient_ratios, name=name, sizes=sizes):
        assert ratios == pytest.approx([1, 1, 1], rel=1e-12)


CLASSES = {
    "plain": {},
    "ignore": {"ignore_index": 2},
    "weight": {"weight": True, "ignore_index": 1},
    "smooth": {"label_smoothing": 0.2, "ignore_index": 1},
    "smooth_weight": {"label_smoothing": 0.2, "weight": True},
}


def classes(mesh, spatial: tuple[int, ...], dim: int, sizes: list[int] | None = None) -> None:
    shape = [3, 5, *spatial]
    if sizes:
        shape[dim] = sum(sizes)
    indices = torch.randint(
        0, 5, (shape[0], *shape[2:]), generator=torch.Generator().manual_seed(4)
    )
    probabilities = numbers(*shape, seed=5).softmax(1)
    placed = [Shard(dim)] * mesh.ndim
    lengths = {0: sizes} if sizes else {}
    for name, options in CLASSES.items():
        options = dict(options)
        if options.get("weight"):
            options["weight"] = numbers(5, seed=6).abs() + 0.1
        for reduction in REDUCTIONS:
            functions = [
                lambda x, o=options, r=reduction: F.cross_entropy(x, indices, reduction=r, **o)
            ]
            if "label_smoothing" not in options:
                functions.append(
                    lambda x, o=options, r=reduction: F.nll_loss(
                        x.log_softmax(1), indices, reduction=r, **o
                    )
                )
            if "ignore_index" not in options:
                functions.append(
                    lambda x, o=options, r=reduction: F.cross_entropy(
                        x, probabilities, reduction=r, **o
                    )
                )
            for which, function in enumerate(functions):
                try:
                    check_same_as_serial(function, [Cut(numbers(*shape), placed, lengths)], mesh)
                except AssertionError as error:
                    text = f"{name} {which} {reduction} of {shape} cut on {dim}: {error}"
                    raise AssertionError(text) from error


@pytest.mark.parametrize(
    ("spatial", "dim"), [((), 0), ((), 1), ((4,), 2), ((4, 3), 0), ((4, 3), 2), ((2, 3, 4), 4)]
)
def test_class_losses(run_mesh, mesh_shape, spatial, dim):
    run_mesh(mesh_shape, classes, spatial=spatial, dim=dim)


@pytest.mark.parametrize("sizes", [[5, 0, 2], [0, 1, 3]])
@pytest.mark.parametrize("dim", [0, 2])
def test_class_losses_of_uneven_pieces(run_mesh, dim, sizes):
    run_mesh((3,), classes, spatial=(4, 3), dim=dim, sizes=sizes)


def sharded_targets(mesh) -> None:
    x = numbers(2, 5, 8)
    indices = torch.randint(0, 5, (2, 8), generator=torch.Generator().manual_seed(4))
    want = F.cross_entropy(x, indices)
    cut = scatter(Cut(indices, [Shard(1)]), mesh)
    assert_equal(
        F.cross_entropy(scatter(Cut(x, [Shard(2)]), mesh), cut), want, "both sharded alike"
    )
    assert_equal(F.cross_entropy(x, cut), want, "only the target is sharded")
    other = scatter(Cut(x, [Shard(0)]), mesh)
    assert_equal(F.cross_entropy(other, cut), want, "sharded on two dims")
    with pytest.raises(RuntimeError, match="cross_entropy_loss: expected class targets of sizes"):
        F.cross_entropy(scatter(Cut(x, [Shard(2)]), mesh), cut[:, :4])


def test_sharded_targets(run_mesh):
    run_mesh((2,), sharded_targets)


def published_weighted_nll(mesh) -> None:
    """A weighted mean divides by the weights of all ranks, not by each rank's own."""
    x = numbers(4, 3, seed=1).log_softmax(1)
    labels, weight = torch.tensor([0, 1, 2, 2]), torch.tensor([0.1, 1.0, 5.0], dtype=torch.float64)
    want = F.nll_loss(x, labels, weight)
    assert_equal(F.nll_loss(sharded(x, mesh, 0), labels, weight), want, "weighted mean")
    everything = torch.full((4,), -100)
    assert F.nll_loss(sharded(x, mesh, 0), everything).isnan()


def test_weighted_nll(run_mesh):
    run_mesh((3,), published_weighted_nll)


def dice(mesh, dims: tuple[int, ...]) -> None:
    t = target(*SHAPE)

    def loss(x):
        p = x.softmax(1)
        overlap, total = (p * t).sum((2, 3)), (p * p).sum((2, 3)) + (t * t).sum((2, 3))
        return (1 - (2 * overlap + 1) / (total + 1)).mean()

    check_same_as_serial(
        loss, [numbers(*SHAPE)], mesh, [Shard(d) for d in dims], output_sharded=False
    )


@pytest.mark.parametrize("dim", range(4))
def test_dice(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, dice, dims=(dim,) * len(mesh_shape))


def cosine_embedding(mesh, dim: int) -> None:
    y = torch.tensor([1, -1, 1, -1, 1])
    check_same_as_serial(
        lambda a: F.cosine_embedding_loss(a, numbers(5, 6, seed=2), y, margin=0.1),
        [numbers(5, 6)],
        mesh,
        [Shard(dim)] * mesh.ndim,
    )


@pytest.mark.parametrize("dim", range(2))
def test_finding_11_cosine_embedding(run_mesh, mesh_shape, dim):
    run_mesh(mesh_shape, cosine_embedding, dim=dim)


def drawn_losses(mesh, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(12):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        dims = [rng.randrange(len(shape)) for _ in range(mesh.ndim)]
        name = rng.choice(["mse", "l1", "smooth_l1", "huber", "soft_margin"])
        reduction = rng.choice(REDUCTIONS)
        t = target(*shape)
        try:
            check_same_as_serial(
                lambda x, n=name, r=reduction, t=t: ELEMENTWISE[n](x, t, reduction=r),
                [numbers(*shape, seed=seed)],
                mesh,
                [Shard(d) for d in dims],
            )
        except Exception as error:
            text = f"seed {seed}: {name} {reduction} of {shape} cut on {dims}: {error}"
            raise AssertionError(text) from error


@pytest.mark.parametrize("seed", range(3))
def test_drawn_losses(run_mesh, mesh_shape, seed):
    print("seed", seed)
    run_mesh(mesh_shape, drawn_losses, seed=seed)
