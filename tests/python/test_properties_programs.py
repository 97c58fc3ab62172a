"""Randomised: programs of several operators, each working on what the one before it left.

What an operator leaves (merged dims, cuts on other dims, empty pieces, strides) is what the next
one meets in a model; writes through chains of views are compared or refused, never lost.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from drawing import Drawn, base_seed, check_draws, draw_cut, draw_valid, values
from oracle import check_same_as_serial
from torch import Tensor

Step = tuple[str, Callable[[Tensor], Tensor]]


def dim_of(rng: random.Random, x: Tensor) -> int:
    """A dim that has elements."""
    return rng.choice([d for d in range(x.dim()) if x.size(d)])


def run_of(rng: random.Random, length: int) -> tuple[int, int]:
    """Begin and length of a part that is not empty."""
    begin = rng.randrange(length)
    return begin, rng.randint(1, length - begin)


# ------------------------------------------------------------------------------------------- views


def transpose(rng: random.Random, x: Tensor) -> Step:
    a, b = dim_of(rng, x), dim_of(rng, x)
    return f"transpose({a}, {b})", lambda t: t.transpose(a, b)


def permute(rng: random.Random, x: Tensor) -> Step:
    order = rng.sample(range(x.dim()), x.dim())
    return f"permute({order})", lambda t: t.permute(order)


def merge(rng: random.Random, x: Tensor) -> Step:
    a = rng.randrange(max(x.dim() - 1, 1))
    sizes = [*x.shape[:a], -1, *x.shape[a + 2 :]]
    return f"view({sizes})", lambda t: t.view(sizes)


def split(rng: random.Random, x: Tensor) -> Step:
    d, k = dim_of(rng, x), rng.choice([2, 3, 4])
    sizes = (k, -1) if rng.random() < 0.5 else (-1, k)
    return f"unflatten({d}, {sizes})", lambda t: t.unflatten(d, sizes)


def narrow(rng: random.Random, x: Tensor) -> Step:
    d = dim_of(rng, x)
    begin, length = run_of(rng, x.size(d))
    return f"narrow({d}, {begin}, {length})", lambda t: t.narrow(d, begin, length)


def every_other(rng: random.Random, x: Tensor) -> Step:
    d, begin, step = dim_of(rng, x), rng.randint(0, 1), rng.randint(2, 3)
    index = (*[slice(None)] * d, slice(begin, None, step))
    return f"dim {d} [{begin}::{step}]", lambda t: t[index]


def select(rng: random.Random, x: Tensor) -> Step:
    d = dim_of(rng, x)
    i = rng.randrange(x.size(d))
    return f"select({d}, {i})", lambda t: t.select(d, i)


def unsqueeze(rng: random.Random, x: Tensor) -> Step:
    d = rng.randint(0, x.dim())
    return f"unsqueeze({d})", lambda t: t.unsqueeze(d)


def squeeze(rng: random.Random, x: Tensor) -> Step:
    return "squeeze()", lambda t: t.squeeze()


def chunk(rng: random.Random, x: Tensor) -> Step:
    d, i = dim_of(rng, x), rng.randrange(2)
    return f"chunk(2, {d})[{i}]", lambda t: t.chunk(2, d)[i]


def unfold(rng: random.Random, x: Tensor) -> Step:
    d, size, step = dim_of(rng, x), rng.randint(1, 3), rng.randint(1, 3)
    return f"unfold({d}, {size}, {step})", lambda t: t.unfold(d, size, step)


def diagonal(rng: random.Random, x: Tensor) -> Step:
    a, b, offset = dim_of(rng, x), dim_of(rng, x), rng.randint(-1, 1)
    return f"diagonal({offset}, {a}, {b})", lambda t: t.diagonal(offset, a, b)


VIEWS = [transpose, permute, merge, split, narrow, every_other, select, unsqueeze, squeeze, chunk]
VIEWS_THAT_OVERLAP = [unfold, diagonal]


# --------------------------------------------------------------------------------- other operators

ALONG_A_DIM: dict[str, Callable[[Tensor, int], Tensor]] = {
    "flip": lambda t, d: t.flip(d),
    "roll": lambda t, d: t.roll(-3, d),
    "cat": lambda t, d: torch.cat([t, 2 * t], d),
    "stack": lambda t, d: torch.stack([t, t.cos()], d),
    "repeat_interleave": lambda t, d: t.repeat_interleave(2, d),
    "cumsum": lambda t, d: 0.3 * t.cumsum(d),
    "cumprod": lambda t, d: (0.1 * t + 1).cumprod(d),
    "sort": lambda t, d: t.sort(dim=d, stable=True)[0],
    "topk": lambda t, d: t.topk(2, d)[0],
    "softmax": lambda t, d: t.softmax(d),
    "center": lambda t, d: t - t.mean(d, keepdim=True),
    "normalize": lambda t, d: F.normalize(t + 0.1, dim=d),
    "weigh": lambda t, d: t * t.sum(d, keepdim=True),
    "sum": lambda t, d: t.sum(d),
    "logsumexp": lambda t, d: t.logsumexp(d),
    "amax": lambda t, d: t.amax(d, keepdim=True) + t,
    "take_argmax": lambda t, d: t.take_along_dim(t.argmax(d, keepdim=True), d) + t,
    "diff": lambda t, d: t.diff(dim=d),
    "rows": lambda t, d: t.index_select(d, torch.tensor([1, 0, 0])),
    "index_add": lambda t, d: t.index_add(d, torch.tensor([1, 0]), t.narrow(d, 0, 2).sin()),
    "fft": lambda t, d: torch.view_as_real(torch.fft.fft(t, dim=d)).sum(-1),
}
WHOLE: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "gelu": F.gelu,
    "masked_fill": lambda t: t.masked_fill(t > 0.4, 0.1),
    "where": lambda t: torch.where(t > 0, t, -0.5 * t),
    "triu": torch.triu,
    "gram": lambda t: 0.2 * (t @ t.transpose(-1, -2)),
    "layer_norm": lambda t: F.layer_norm(t, t.shape[-1:]),
    "group_norm": lambda t: F.group_norm(t, 2),
    "contiguous": lambda t: t.contiguous(),
    "max_pool": lambda t: F.max_pool2d(t, 2, 1, 1),
    "avg_pool": lambda t: F.avg_pool1d(t, 3, 2, 1),
    "interpolate": lambda t: F.interpolate(t, size=(5, 3), mode="bilinear"),
    "pad": lambda t: F.pad(t, [1, 2]),
    "pad_circular": lambda t: F.pad(t, [1, 1, 1, 1], mode="circular"),
    "inner_gradient": lambda t: (
        t + torch.autograd.grad((t * t.sin()).sum(), t, create_graph=True)[0]
    ),
}


def along_a_dim(rng: random.Random, x: Tensor) -> Step:
    name, d = rng.choice(list(ALONG_A_DIM)), dim_of(rng, x)
    return f"{name}({d})", lambda t: ALONG_A_DIM[name](t, d)


def whole(rng: random.Random, x: Tensor) -> Step:
    name = rng.choice(list(WHOLE))
    return name, WHOLE[name]


def convolution(rng: random.Random, x: Tensor) -> Step:
    n = max(1, min(x.dim() - 2, 3))
    kernel, stride, padding = rng.randint(1, 3), rng.randint(1, 2), rng.randint(0, 1)
    weight = 0.3 * values(rng, 2, x.size(1) if x.dim() > 1 else 1, *[kernel] * n)
    conv = [F.conv1d, F.conv2d, F.conv3d][n - 1]
    text = f"conv{n}d({kernel}, {stride}, {padding})"
    return text, lambda t: conv(t, weight, None, stride, padding)


WRITES: dict[str, Callable[[Tensor, Tensor], object]] = {
    "mul_": lambda view, _: view.mul_(2),
    "copy_": lambda view, source: view.copy_(source),
    "assign": lambda view, source: view.__setitem__(..., 2 * source),
    "from_itself": lambda view, _: view.copy_(view.clone().sin()),
}


def write_through_views(rng: random.Random, x: Tensor, views: list) -> Step:
    """A write to what up to four views of a copy show; the copy is the result."""
    chain: list[Step] = []
    view = x.detach().clone()
    for _ in range(rng.randint(1, 4)):
        text, function = rng.choice(views)(rng, view)
        try:
            further = function(view)
        except (RuntimeError, ValueError, IndexError):
            continue
        if further.numel() and further.dim():
            chain.append((text, function))
            view = further
    name, source = rng.choice(list(WRITES)), values(rng, *view.shape)

    def write(t: Tensor) -> Tensor:
        base = t * 1
        view = base
        for _, function in chain:
            view = function(view)
        WRITES[name](view, source)
        return base

    return f"[{' . '.join(text for text, _ in chain)}].{name}", write


# ---------------------------------------------------------------------------------------- programs

STEPS = [*VIEWS, *VIEWS_THAT_OVERLAP, *[along_a_dim] * 8, *[whole] * 6, *[convolution] * 3]


def usable(x: Tensor) -> bool:
    """Small, finite, and something for the next step to work on."""
    return x.dim() > 0 and 0 < x.numel() < 2000 and bool(x.isfinite().all()) and x.abs().max() < 1e3


def draw_program(rng: random.Random, steps: list, length: int) -> Drawn:
    """Up to `length` steps, each valid on what the ones before it leave."""
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
    x = values(rng, *shape)
    program: list[Step] = []
    current = x.clone().requires_grad_()
    for _ in range(4 * length):
        if len(program) == length or current.dim() == 0:
            break
        try:
            text, function = rng.choice(steps)(rng, current)
            after = function(current)
        except (RuntimeError, ValueError, IndexError):
            continue
        if usable(after.detach()):
            program.append((text, function))
            current = after

    def run(t: Tensor) -> Tensor:
        for _, function in program:
            t = function(t)
        return t * 1

    return Drawn(" | ".join(text for text, _ in program), run, x, range(x.dim()))


def programs(mesh, seed: int, count: int) -> None:
    def draw(rng: random.Random) -> Drawn:
        drawn = draw_program(rng, STEPS, length=6)
        drawn.options = {"no_fallback": False, "rtol": 1e-7, "atol": 1e-8}
        return drawn

    check_draws(mesh, draw, range(seed, seed + count))


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
def test_programs(run_mesh, mesh):
    seed = base_seed()
    print(f"SHARDFIELD_SEED={seed}")
    run_mesh(mesh, programs, seed=seed + 1000 * math.prod(mesh), count=40)


# A write to what a copy shows; the gradient of a write to a view of a plain row, cut otherwise.
REFUSALS = ("cannot write in place", "as_strided: a sharded tensor has no strides")


def writes(mesh, seed: int, count: int) -> None:
    refused = 0
    for each in range(seed, seed + count):
        rng = random.Random(each)
        views = VIEWS + VIEWS_THAT_OVERLAP[1:]  # a write to windows that overlap has no one answer

        def draw(rng: random.Random, views: list = views) -> Drawn:
            step = lambda rng, x: write_through_views(rng, x, views)  # noqa: E731
            return draw_program(rng, [merge, split, transpose, step, step], length=4)

        drawn = draw_valid(rng, draw)
        cut = draw_cut(rng, drawn, mesh)
        try:
            check_same_as_serial(drawn.function, [cut], mesh, no_fallback=False)
        except RuntimeError as error:
            said = any(part in str(error) for part in REFUSALS)
            assert said, f"SHARDFIELD_SEED={each}: {drawn.text}: {error}"
            refused += 1
        except AssertionError as error:
            raise AssertionError(f"SHARDFIELD_SEED={each}: {drawn.text}: {error}") from error
    assert refused < count / 4, f"{refused} of {count} programs were refused"


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2)], ids=str)
def test_writes_through_views_are_seen_or_refused(run_mesh, mesh):
    seed = base_seed()
    print(f"SHARDFIELD_SEED={seed}")
    run_mesh(mesh, writes, seed=seed + 1000 * math.prod(mesh), count=40)
