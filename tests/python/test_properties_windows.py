"""Randomised: convolution, transposed convolution, pooling, interpolation, padding."""

from __future__ import annotations

import random

import pytest
import torch.nn.functional as F
from drawing import Drawn, base_seed, check_draws, each, shape_of, values
from torch import nn

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
MEAN = {1: F.avg_pool1d, 2: F.avg_pool2d, 3: F.avg_pool3d}
LP = {1: F.lp_pool1d, 2: F.lp_pool2d, 3: F.lp_pool3d}
ADAPTIVE_MEAN = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
ADAPTIVE_MAX = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


def conv(rng: random.Random) -> Drawn:
    nd, groups = rng.randint(1, 3), rng.choice([1, 1, 2])
    k, s, d = each(rng, nd, 1, 5), each(rng, nd, 1, 3), each(rng, nd, 1, 3)
    p = each(rng, nd, 0, 4)
    padding = rng.choice([p, p, p, "same", "valid"])
    if padding == "same":
        s = (1,) * nd
    x = values(rng, rng.randint(1, 2), 2 * groups, *shape_of(rng, nd))
    w = values(rng, 2 * groups, 2, *k)
    bias = [values(rng, 2 * groups)] if rng.random() < 0.5 else []
    return Drawn(
        f"conv{nd}d k{k} s{s} p{padding} d{d} g{groups} bias {bool(bias)}",
        lambda t, w, b=None: CONV[nd](
            t, w, b, stride=s, padding=padding, dilation=d, groups=groups
        ),
        x,
        range(2, 2 + nd),
        [w, *bias],
    )


def conv_module(rng: random.Random) -> Drawn:
    nd, mode = rng.randint(1, 3), rng.choice(["reflect", "replicate", "circular"])
    k = each(rng, nd, 1, 5)
    p = tuple(rng.randint(0, n - 1) for n in k)
    module = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[nd](
        2, 2, k, stride=each(rng, nd, 1, 2), padding=p, padding_mode=mode
    ).double()
    for parameter in module.parameters():
        parameter.data = values(rng, *parameter.shape)
    x = values(rng, 1, 2, *shape_of(rng, nd))
    return Drawn(repr(module), module, x, range(2, 2 + nd))


def transposed(rng: random.Random) -> Drawn:
    nd, groups = rng.randint(1, 3), rng.choice([1, 1, 2])
    k, s, d = each(rng, nd, 1, 4), each(rng, nd, 1, 3), each(rng, nd, 1, 2)
    p = each(rng, nd, 0, 3)
    extra = tuple(rng.randint(0, max(a, b) - 1) for a, b in zip(s, d, strict=True))
    x = values(rng, 1, 2 * groups, *shape_of(rng, nd, 8))
    w = values(rng, 2 * groups, 2, *k)
    return Drawn(
        f"conv_transpose{nd}d k{k} s{s} p{p} d{d} g{groups} output_padding {extra}",
        lambda t, w: TRANSPOSED[nd](t, w, None, s, p, extra, groups, d),
        x,
        range(2, 2 + nd),
        [w],
    )


def max_pool(rng: random.Random) -> Drawn:
    nd = rng.randint(1, 3)
    k, s, d = each(rng, nd, 1, 4), each(rng, nd, 1, 3), each(rng, nd, 1, 2)
    p = tuple(rng.randint(0, n // 2) for n in k)
    ceil = rng.random() < 0.5
    return Drawn(
        f"max_pool{nd}d k{k} s{s} p{p} d{d} ceil {ceil}",
        lambda t: MAX[nd](t, k, s, p, d, ceil_mode=ceil),
        values(rng, 1, 2, *shape_of(rng, nd)),
        range(2, 2 + nd),
    )


def mean_pool(rng: random.Random) -> Drawn:
    nd = rng.randint(1, 3)
    k, s = each(rng, nd, 1, 4), each(rng, nd, 1, 3)
    p = tuple(rng.randint(0, n // 2) for n in k)
    ceil, count = rng.random() < 0.5, rng.random() < 0.5
    divisor = {"divisor_override": 3} if nd > 1 and rng.random() < 0.2 else {}
    return Drawn(
        f"avg_pool{nd}d k{k} s{s} p{p} ceil {ceil} count_include_pad {count} {divisor}",
        lambda t: MEAN[nd](t, k, s, p, ceil_mode=ceil, count_include_pad=count, **divisor),
        values(rng, 1, 2, *shape_of(rng, nd)),
        range(2, 2 + nd),
    )


def lp_pool(rng: random.Random) -> Drawn:
    nd = rng.randint(1, 3)
    k, s, norm = each(rng, nd, 1, 3), each(rng, nd, 1, 3), rng.choice([2.0, 3.0])
    ceil = rng.random() < 0.3
    return Drawn(
        f"lp_pool{nd}d norm {norm} k{k} s{s} ceil {ceil}",
        lambda t: LP[nd](t, norm, k[0] if nd == 1 else k, s[0] if nd == 1 else s, ceil),
        values(rng, 1, 2, *shape_of(rng, nd)).abs() + 0.5,
        range(2, 2 + nd),
    )


def adaptive_pool(rng: random.Random) -> Drawn:
    nd, kind = rng.randint(1, 3), rng.choice(["mean", "max"])
    size = each(rng, nd, 1, 7)
    pool = (ADAPTIVE_MEAN if kind == "mean" else ADAPTIVE_MAX)[nd]
    return Drawn(
        f"adaptive {kind} pool{nd}d to {size}",
        lambda t: pool(t, size),
        values(rng, 1, 2, *shape_of(rng, nd)),
        range(2, 2 + nd),
    )


def interpolate(rng: random.Random) -> Drawn:
    nd = rng.randint(1, 3)
    smooth = {1: ["linear"], 2: ["bilinear", "bicubic"], 3: ["trilinear"]}[nd]
    mode = rng.choice(["nearest", "nearest-exact", "area", *smooth, *smooth])
    options: dict = {"mode": mode}
    if mode in smooth:
        options["align_corners"] = rng.random() < 0.5
    if rng.random() < 0.5:
        options["size"] = each(rng, nd, 1, 17)
    else:
        options["scale_factor"] = tuple(
            rng.choice([0.4, 0.5, 0.75, 1.5, 2, 3.1]) for _ in range(nd)
        )
        if mode != "area":
            options["recompute_scale_factor"] = rng.choice([None, None, True])
    if mode in ("bilinear", "bicubic") and rng.random() < 0.2:
        options["antialias"] = True
    return Drawn(
        f"interpolate{nd}d {options}",
        lambda t: F.interpolate(t, **options),
        values(rng, 1, 2, *shape_of(rng, nd, 10)),
        range(2, 2 + nd),
    )


def pad(rng: random.Random) -> Drawn:
    nd = rng.randint(1, 3)
    mode = rng.choice(["constant", "reflect", "replicate", "circular"])
    low = -2 if mode == "constant" else 0
    widths = [rng.randint(low, 4) for _ in range(2 * nd)]
    options = {"value": 1.5} if mode == "constant" and rng.random() < 0.5 else {}
    return Drawn(
        f"pad{nd}d {mode} {widths} {options}",
        lambda t: F.pad(t, widths, mode=mode, **options),
        values(rng, 1, 2, *shape_of(rng, nd)),
        range(2, 2 + nd),
    )


FAMILIES = {
    f.__name__: f
    for f in (
        conv,
        conv_module,
        transposed,
        max_pool,
        mean_pool,
        lp_pool,
        adaptive_pool,
        interpolate,
        pad,
    )
}


def draws(mesh, family: str, seeds: list[int]) -> None:
    check_draws(mesh, FAMILIES[family], seeds)


@pytest.mark.parametrize("family", FAMILIES)
def test_windows(run_mesh, mesh_shape, family):
    base = base_seed()
    seeds = list(range(base, base + (6 if mesh_shape == (1,) else 14)))
    print(f"seeds {seeds[0]} to {seeds[-1]}; repeat one with SHARDFIELD_SEED")
    run_mesh(mesh_shape, draws, family=family, seeds=seeds, limit_s=180)
