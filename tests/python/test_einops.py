"""einops on sharded tensors: patterns that merge, split, drop and repeat cut dims."""

from __future__ import annotations

import einops
import pytest
import torch
from einops.layers.torch import Rearrange, Reduce
from oracle import Cut, check_same_as_serial, numbers
from torch import nn
from torch.distributed.tensor import Shard

SHAPE = (2, 3, 8, 12)

REARRANGE = {
    "tokens": ("b c h w -> b (h w) c", {}),
    "patches": ("b c (h p) (w q) -> b (h w) (p q c)", {"p": 2, "q": 3}),
    "windows": ("b c (h p) (w q) -> (b h w) p q c", {"p": 4, "q": 4}),
    "depth": ("b c (h p) w -> b (c p) h w", {"p": 2}),
    "swapped": ("b c h w -> w h c b", {}),
    "flat": ("b c h w -> (b c h w)", {}),
    "batch": ("b c h w -> (b h) c w", {}),
}
REDUCE = {
    "pool": ("b c (h p) (w q) -> b c h w", "max", {"p": 2, "q": 2}),
    "mean": ("b c h w -> b c", "mean", {}),
    "rows": ("b c h w -> h", "sum", {}),
}


def patterns(mesh, dims: tuple[int, ...]) -> None:
    cut = Cut(numbers(*SHAPE), [Shard(d) for d in dims])
    for name, (pattern, sizes) in REARRANGE.items():
        print(name)
        check_same_as_serial(
            lambda t, p=pattern, s=sizes: einops.rearrange(t, p, **s).sin(), [cut], mesh
        )
    for name, (pattern, kind, sizes) in REDUCE.items():
        print(name)
        check_same_as_serial(
            lambda t, p=pattern, k=kind, s=sizes: einops.reduce(t, p, k, **s).sin(), [cut], mesh
        )
    check_same_as_serial(
        lambda t: einops.repeat(t, "b c h w -> b c (h 2) (k w)", k=3).sin(), [cut], mesh
    )
    check_same_as_serial(
        lambda t: einops.einsum(t, t.cos(), "b c h w, b k h w -> b c k"), [cut], mesh
    )
    check_same_as_serial(
        lambda t: einops.rearrange([t, t.exp()], "k b c h w -> b (k c) h w"), [cut], mesh
    )


@pytest.mark.parametrize("dim", [0, 2, 3])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_patterns(run_mesh, size, dim):
    run_mesh((size,), patterns, dims=(dim,))


def test_patterns_on_two_dims(run_mesh):
    run_mesh((2, 2), patterns, dims=(2, 3))


def layers(mesh) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(
        Rearrange("b c (h p) (w q) -> b (h w) (p q c)", p=2, q=2),
        nn.Linear(12, 5),
        nn.LayerNorm(5),
        nn.GELU(),
        Rearrange("b (h w) c -> b c h w", h=4),
        Reduce("b c h w -> b c h", "mean"),
    ).double()
    check_same_as_serial(net, [Cut(numbers(*SHAPE), [Shard(2)])], mesh)


@pytest.mark.parametrize("size", [2, 3])
def test_layers(run_mesh, size):
    run_mesh((size,), layers)
