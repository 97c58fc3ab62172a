"""Silent faults of comparable systems (findings 1, 3, 4 and 11), with the right values."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, check_same_as_serial, full, numbers, sharded
from torch import nn
from torch.distributed.tensor import Shard

LOSSES = {
    "mse": F.mse_loss,
    "smooth_l1": F.smooth_l1_loss,
    "huber": F.huber_loss,
    "l1": F.l1_loss,
    "bce_logits": lambda a, b: F.binary_cross_entropy_with_logits(a, b.sigmoid()),
    "bce": lambda a, b: F.binary_cross_entropy(a.sigmoid(), b.sigmoid()),
    "soft_margin": lambda a, b: F.soft_margin_loss(a, b.detach().sign()),
    "kl_div": lambda a, b: F.kl_div(a.log_softmax(1), b.softmax(1), reduction="batchmean"),
    "poisson": lambda a, b: F.poisson_nll_loss(a, b.abs()),
    "square": lambda a, b: ((a - b) ** 2).mean(),
    "cosine": lambda a, b: F.cosine_embedding_loss(
        a.flatten(1), b.flatten(1), torch.ones(1, dtype=torch.float64)
    ),
}


def loss(mesh, name: str, sizes: list[int] | None, target_is_sharded: bool, reduction: str) -> None:
    a, b = numbers(1, 3, 10, 4), numbers(1, 3, 10, 4, seed=1)
    function = LOSSES[name]
    if reduction != "mean":
        function = lambda x, y: LOSSES[name](x, y, reduction=reduction)  # noqa: E731
    cut = {0: sizes} if sizes else {}
    inputs = [Cut(a, [Shard(2)], cut)]
    plain = []
    if target_is_sharded:
        inputs.append(Cut(b, [Shard(2)], cut))
    else:
        plain.append(b)
    check_same_as_serial(function, inputs, mesh, plain=plain, no_fallback=name != "cosine")


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("target", ["sharded", "plain"])
def test_finding_1_losses_on_spatial_shards(run_mesh, name, target):
    run_mesh(
        (2,), loss, name=name, sizes=None, target_is_sharded=target == "sharded", reduction="mean"
    )
    run_mesh(
        (3,),
        loss,
        name=name,
        sizes=[7, 0, 3],
        target_is_sharded=target == "sharded",
        reduction="mean",
    )
    if name in ("mse", "smooth_l1", "huber", "l1"):
        for reduction in ("sum", "none"):
            run_mesh(
                (2,),
                loss,
                name=name,
                sizes=[7, 3],
                target_is_sharded=target == "sharded",
                reduction=reduction,
            )


def cross_entropy(mesh, weighted: bool, sizes: list[int] | None) -> None:
    target = (numbers(2, 10, 4, seed=1) > 0).long() + (numbers(2, 10, 4, seed=2) > 0.5).long()
    target[0, 3, 1] = -100
    weight = torch.tensor([0.2, 1.0, 3.0], dtype=torch.float64) if weighted else None
    cut = {0: sizes} if sizes else {}
    from oracle import scatter

    for reduction in ("mean", "sum", "none"):
        for smoothing in (0.0, 0.1):
            ours = scatter(Cut(target, [Shard(1)], cut), mesh)

            def function(x, r=reduction, s=smoothing, t=ours):
                labels = t if x.shape and hasattr(x, "to_local") else target
                return F.cross_entropy(x, labels, weight, reduction=r, label_smoothing=s)

            check_same_as_serial(function, [Cut(numbers(2, 3, 10, 4), [Shard(2)], cut)], mesh)


@pytest.mark.parametrize("weighted", [False, True], ids=["unweighted", "weighted"])
def test_finding_1_cross_entropy(run_mesh, weighted):
    run_mesh((2,), cross_entropy, weighted=weighted, sizes=None)
    run_mesh((3,), cross_entropy, weighted=weighted, sizes=[6, 0, 4])


def strided_convolution(mesh) -> None:
    for k, p in ((3, 1), (2, 0)):
        for placement in (2, 3):
            check_same_as_serial(
                lambda x, w, p=p: F.conv2d(x, w, stride=2, padding=p),
                [numbers(1, 2, 10, 10)],
                mesh,
                [Shard(placement)],
                plain=[numbers(3, 2, k, k, seed=1)],
                output_sharded=True,
            )


def test_finding_3_stride_2_on_odd_local_sizes(run_mesh):
    run_mesh((2,), strided_convolution)


def corner_aligned(mesh) -> None:
    for mode, size in (("bilinear", (17, 12)), ("bilinear", (5, 4)), ("bicubic", (13, 16))):
        check_same_as_serial(
            lambda x, m=mode, s=size: F.interpolate(x, size=s, mode=m, align_corners=True),
            [numbers(1, 2, 10, 8)],
            mesh,
            [Shard(2)],
        )


def test_finding_3_interpolate_align_corners(run_mesh):
    run_mesh((2,), corner_aligned)
    run_mesh((3,), corner_aligned)


def nearest_half(mesh) -> None:
    for mode in ("nearest", "nearest-exact", "area"):
        check_same_as_serial(
            lambda x, m=mode: F.interpolate(x, scale_factor=0.5, mode=m),
            [numbers(1, 2, 10, 8)],
            mesh,
            [Shard(2)],
        )


def test_finding_3_interpolate_nearest_half(run_mesh):
    run_mesh((2,), nearest_half)


def halves_of_a_mask(mesh) -> list[float]:
    torch.manual_seed(0)
    x = sharded(torch.ones(2000), mesh, 0)
    y = F.dropout(x, 0.5)
    return y.to_local().tolist()


def test_finding_3_dropout_halves_differ(run_mesh):
    left, right = run_mesh((2,), halves_of_a_mask)
    agree = sum(a == b for a, b in zip(left, right, strict=True))
    assert 400 < agree < 600


NOT_GATHERED = {
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "instance_norm": lambda x: F.instance_norm(x),
    "layer_norm": lambda x: F.layer_norm(x, x.shape[2:]),
    "softmax": lambda x: x.softmax(2),
    "var": lambda x: x.var((2, 3)),
    "std": lambda x: x.std(2),
    "flip": lambda x: x.flip(2),
    "roll": lambda x: x.roll(3, 2),
    "slice": lambda x: x[:, :, 2:9],
    "cat": lambda x: torch.cat([x, x], 2),
    "circular_pad": lambda x: F.pad(x, (0, 0, 2, 3), mode="circular"),
    "overlapping_pool": lambda x: F.max_pool2d(x, 3, 2, 1),
    "interpolate_size": lambda x: F.interpolate(x, size=(23, 9)),
    "group_norm": lambda x: F.group_norm(x, 2),
}


def not_gathered(mesh, name: str, dims: tuple[int, ...]) -> None:
    check_same_as_serial(NOT_GATHERED[name], [numbers(2, 4, 12, 6)], mesh, [Shard(d) for d in dims])


@pytest.mark.parametrize("name", NOT_GATHERED)
def test_finding_4_done_without_a_gather_and_with_a_backward(run_mesh, name):
    run_mesh((2,), not_gathered, name=name, dims=(2,))
    run_mesh((3,), not_gathered, name=name, dims=(2,))
    run_mesh((2, 2), not_gathered, name=name, dims=(2, 3))


def learned_windows(mesh) -> None:
    w = numbers(4, 4, 4, 4, seed=1)
    x = numbers(2, 4, 12, 8)
    for function in (
        lambda t, v: F.conv2d(t, v, stride=2, padding=1),
        lambda t, v: F.conv_transpose2d(t, v, stride=2, padding=1),
        lambda t, v: F.conv2d(t, v, padding="same", dilation=3),
    ):
        check_same_as_serial(function, [x], mesh, [Shard(2)], plain=[w])


def test_finding_4_k4_s2_p1_and_wide_halos(run_mesh):
    for ranks in (2, 3, 4):
        run_mesh((ranks,), learned_windows)


def running_norm(mesh, dims: tuple[int, ...]) -> None:
    for norm in (nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=None), nn.GroupNorm(2, 4)):
        check_same_as_serial(norm.double(), [numbers(2, 4, 9, 6)], mesh, [Shard(d) for d in dims])


def test_finding_4_norms_on_two_axes(run_mesh):
    run_mesh((2,), running_norm, dims=(2,))
    run_mesh((2, 2), running_norm, dims=(2, 3))


OPERATORS = {
    "quantile": lambda x: torch.quantile(x, 0.3),
    "vector_matrix": lambda x: x[0] @ x.t(),
    "histc": lambda x: torch.histc(x.detach(), 5, -2, 2),
    "amax": lambda x: x.amax(0),
    "adaptive_avg_pool": lambda x: F.adaptive_avg_pool2d(x.view(1, *x.shape), 1),
    "norm_inf": lambda x: torch.linalg.vector_norm(x, float("inf")),
    "view": lambda x: x.view(-1) * 2,
    "sum_keepdim": lambda x: x.sum(0, keepdim=True),
    "addmm": lambda x: torch.addmm(x[:, :1], x, x.t()),
    "tensordot": lambda x: torch.tensordot(x, x, dims=([0], [0])),
    "masked_select": lambda x: x[x > 0],
    "nonzero": lambda x: (x.detach() > 0).nonzero(),
    "index_list": lambda x: x[[0, 3, 5]],
    "unbind": lambda x: x.unbind(0),
    "cumprod": lambda x: x.cumprod(0),
    "cumsum": lambda x: x.cumsum(0),
    "unfold": lambda x: x.unfold(0, 3, 2) * 1,
    "negative_pad": lambda x: F.pad(x, (0, 0, -1, -2)),
    "select": lambda x: x.select(0, 4) * 2,
    "median": lambda x: x.median(),
    "sort": lambda x: x.sort(0).values,
}


def operator(mesh, name: str, sizes: list[int] | None) -> None:
    check_same_as_serial(
        OPERATORS[name],
        [Cut(numbers(7, 5), [Shard(0)], {0: sizes} if sizes else {})],
        mesh,
        second=name not in ("histc", "nonzero", "norm_inf", "cumprod"),
        no_fallback=False,
    )


@pytest.mark.parametrize("name", OPERATORS)
def test_finding_11_operators_silent_or_failing_elsewhere(run_mesh, name):
    run_mesh((2,), operator, name=name, sizes=None)
    run_mesh((3,), operator, name=name, sizes=[4, 0, 3])


def dice(mesh) -> None:
    def dice_loss(x, y):
        p = x.softmax(1)
        overlap = (p * y).sum((2, 3, 4))
        return 1 - (2 * overlap / (p.sum((2, 3, 4)) + y.sum((2, 3, 4)) + 1e-5)).mean()

    labels = F.one_hot((numbers(1, 5, 4, 3, seed=2) > 0).long(), 2).permute(0, 4, 1, 2, 3).double()
    check_same_as_serial(dice_loss, [numbers(1, 2, 5, 4, 3), labels], mesh, [Shard(2)])
    check_same_as_serial(dice_loss, [numbers(1, 2, 5, 4, 3)], mesh, [Shard(2)], plain=[labels])
    assert_equal(full(sharded(labels, mesh, 2)), labels, "labels")


def test_dice_loss(run_mesh, ranks):
    run_mesh((ranks,), dice)
