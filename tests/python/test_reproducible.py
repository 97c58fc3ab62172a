"""Reproducible mode: the same bits for every number of ranks, and the serial values."""

from __future__ import annotations

import contextlib
import copy
import functools
import hashlib
import math
import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from oracle import Cut, assert_equal, check_same_as_serial, full, numbers, scatter, sharded
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import shardfield

MESHES = [(1,), (2,), (3,), (4,), (2, 2)]


@contextlib.contextmanager
def reproducible() -> Iterator[None]:
    shardfield.set_reproducible(True)
    try:
        yield
    finally:
        shardfield.set_reproducible(False)


def bits(*tensors: Tensor) -> str:
    """A digest of every bit."""
    digest = hashlib.sha256()
    for t in tensors:
        digest.update(full(t.detach()).numpy().tobytes())
    return digest.hexdigest()


class Windows(nn.Module):
    """Convolutions of all kinds, norms, windows and every kind of activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.GELU(),
            nn.MaxPool2d(3, 2, 1),
            nn.Conv2d(6, 8, 3, stride=2, padding=1, groups=2, padding_mode="reflect"),
            nn.GroupNorm(2, 8),
            nn.SiLU(),
            nn.ConvTranspose2d(8, 4, 2, stride=2),
            nn.InstanceNorm2d(4, affine=True),
            nn.Upsample(scale_factor=2),
            nn.Softplus(),
            nn.Conv2d(4, 3, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Sequence(nn.Module):
    """A transformer block on tokens; the loss sees softmax over the cut dim as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.block = nn.TransformerEncoderLayer(
            8, 2, 16, dropout=0.0, activation="gelu", batch_first=True
        )
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        return self.head(self.block(x) * x.softmax(1) + F.rms_norm(x, (8,)))


class Pyramid(nn.Module):
    """A small U-Net: overlapping average pooling down, bilinear upsampling and skips up."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 6, 3, padding=1)
        self.deep = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.Conv2d(12, 4, 3, padding=1)
        self.last = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = F.gelu(self.first(x))
        middle = F.gelu(self.second(F.avg_pool2d(fine, 3, 2, 1)))
        coarse = F.gelu(self.deep(F.avg_pool2d(middle, 3, 2, 1, count_include_pad=False)))
        middle = torch.cat([middle, self.doubled(coarse, "bicubic", False)], 1)
        fine = torch.cat([fine, self.doubled(F.gelu(self.up(middle)), "bilinear", True)], 1)
        return self.last(fine + F.adaptive_avg_pool2d(fine, (3, 5)).mean())

    @staticmethod
    def doubled(x: Tensor, mode: str, corners: bool) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode=mode, align_corners=corners)


class Spectral(nn.Module):
    """A Fourier layer (Li et al., 2021): complex weights on the lowest frequencies of two dims."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Conv2d(2, 4, 1)
        self.weight = nn.Parameter(numbers(4, 4, 7, 5, 2).float() / 8)
        self.head = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.lift(x))
        spectrum = torch.fft.rfft2(x)
        low = torch.einsum(
            "bixy,ioxy->boxy", spectrum[..., :7, :5], torch.view_as_complex(self.weight)
        )
        kept = torch.zeros_like(spectrum)
        kept[..., :7, :5] = low
        return self.head(x + torch.fft.irfft2(kept, s=x.shape[-2:], norm="forward") / 100)


MODELS = {"windows": Windows, "sequence": Sequence, "pyramid": Pyramid, "spectral": Spectral}


def train(mesh, model: str, dims: tuple[int, ...], sizes: list[int] | None, dtype: str) -> tuple:
    """Three steps; digests of losses, gradients, weights and buffers."""
    kind = getattr(torch, dtype)
    torch.manual_seed(3)
    net = MODELS[model]().to(kind)
    if model != "sequence":
        shape = (2, 2, 32, 20)
        sample, label = numbers(*shape, dtype=kind), torch.randint(0, 3, (2, 32, 20))
    else:
        shape = (2, 30)
        sample, label = torch.randint(0, 11, shape), torch.randint(0, 3, shape)
    lengths = {0: sizes} if sizes else {}
    skip = 0 if model == "sequence" else 1
    x = scatter(Cut(sample, [Shard(d) for d in dims], lengths), mesh)
    t = scatter(Cut(label, [Shard(d - skip) for d in dims], lengths), mesh)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    losses: list[float] = []
    with reproducible():
        for _ in range(3):
            out = net(x)
            scores = out.transpose(1, 2) if model == "sequence" else out
            loss = F.cross_entropy(scores, t) + 0.1 * out.square().mean() + out.norm() / 100
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    gradients = [p.grad for p in net.parameters()]
    return losses, bits(*gradients), bits(*net.state_dict().values())


def uneven(length: int, ranks: int, seed: int) -> list[int]:
    borders = sorted(random.Random(seed).randint(0, length) for _ in range(ranks - 1))
    return [b - a for a, b in zip([0, *borders], [*borders, length], strict=True)]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("model", list(MODELS))
def test_training_has_the_same_bits_on_every_mesh(run_mesh, model, dtype):
    seen = {}
    for shape in MESHES:
        ranks = math.prod(shape)
        dims = [(1,), (0,)] if model == "sequence" else [(2,), (3,)]
        if len(shape) == 2:
            dims = [(0, 1)] if model == "sequence" else [(2, 3), (3, 2)]
        length = 30 if model == "sequence" else 32
        cuts = [(d, None) for d in dims]
        if len(shape) == 1:
            cuts.append((dims[0], uneven(length, ranks, seed=ranks)))
        if model in ("pyramid", "spectral"):  # many layers: one cut of each mesh
            cuts = [cuts[0] if dtype == "float64" else cuts[-1]]
        for d, sizes in cuts:
            for result in run_mesh(shape, train, model=model, dims=d, sizes=sizes, dtype=dtype):
                seen[shape, d, str(sizes)] = result
    assert len(set(map(str, seen.values()))) == 1, seen


def usual_training(mesh, dims: tuple[int, ...]) -> str:
    torch.manual_seed(3)
    net, x = Windows().float(), numbers(2, 2, 32, 20, dtype=torch.float32)
    net(sharded(x, mesh, dims[0])).square().mean().backward()
    return bits(*[p.grad for p in net.parameters()])


def test_without_the_mode_the_order_of_sums_shows(run_mesh):
    """Or the test above would show nothing."""
    assert len({run_mesh(shape, usual_training, dims=(2,))[0] for shape in MESHES}) > 1


def draw_ops(seed: int, decades: float = 6) -> dict[str, tuple]:
    """Ops with their operands: (function, [(operand, the dim to cut or None), ...]).

    `decades` above and below 1 are the magnitudes that stand in one sum.
    """
    draw = random.Random(seed)
    rows, inner, cols = (draw.randint(5, 40) for _ in range(3))
    a, b = numbers(rows, inner, seed=seed), numbers(inner, cols, seed=seed + 1)
    wide = numbers(rows, 3, inner, seed=seed + 2) * torch.logspace(
        -decades, decades, inner, dtype=torch.float64
    )
    volume = numbers(1, 2, 9, 8, 7, seed=seed + 3)
    kernel = numbers(3, 2, 3, 2, 3, seed=seed + 4)
    places = torch.randint(0, 5, (rows,), generator=torch.Generator().manual_seed(seed))
    cut = draw.randrange(2)
    pairs, as_complex = torch.view_as_real, torch.view_as_complex
    pairs_of = numbers(rows, inner, 2, seed=seed + 5)
    return {
        "mm": (torch.mm, [(a, cut), (b, None)]),
        "mm_contracted": (torch.mm, [(a, 1), (b, 0)]),
        "matmul": (lambda x, y: x @ y, [(wide, draw.choice([0, 2])), (b, None)]),
        "bmm": (torch.bmm, [(wide, 0), (b.expand(rows, -1, -1).contiguous(), 0)]),
        "addmm": (
            lambda c, x, y: torch.addmm(c, x, y, beta=0.3, alpha=1.7),
            [(numbers(rows, cols), 0), (a, 0), (b, None)],
        ),
        "einsum": (lambda x, y: torch.einsum("rci,ij->cj", x, y), [(wide, 0), (b, None)]),
        "dot": (torch.dot, [(a[:, 0].clone(), 0), (a[:, 1].clone(), 0)]),
        "mv": (torch.mv, [(a, cut), (b[:, 0].clone(), None)]),
        "sum": (lambda x: x.sum((0, 2)), [(wide, 2)]),
        "mean": (lambda x: x.mean(), [(wide, 0)]),
        "var": (lambda x: torch.stack([x.var(), x.std(correction=0)]), [(wide, 2)]),
        "var_mean": (lambda x: torch.cat(torch.var_mean(x, 2)), [(wide, 2)]),
        "norms": (
            lambda x: torch.stack([x.norm(), x.norm(p=1), x.norm(p=3), x.norm(p=math.inf)]),
            [(wide, 0)],
        ),
        "logsumexp": (lambda x: x.logsumexp(0), [(a, 0)]),
        "softmax": (lambda x: x.softmax(cut) * x.log_softmax(1 - cut), [(a, 0)]),
        "conv3d": (
            lambda x, w: F.conv3d(x, w, w[:, 0, 0, 0, 0], stride=(2, 1, 1), padding=1),
            [(volume, draw.choice([2, 3, 4])), (kernel, None)],
        ),
        "conv_transpose3d": (
            lambda x, w: F.conv_transpose3d(x, w, stride=2, output_padding=1),
            [(volume, draw.choice([2, 3, 4])), (kernel.transpose(0, 1).contiguous(), None)],
        ),
        "layer_norm": (lambda x: F.layer_norm(x, x.shape[1:]), [(wide, draw.choice([0, 2]))]),
        "bce": (lambda x: F.binary_cross_entropy_with_logits(x, x.detach().sigmoid()), [(a, 0)]),
        "losses": (
            lambda x: F.huber_loss(x, x.detach() * 2) + F.smooth_l1_loss(x, x.detach().cos()),
            [(a, 0)],
        ),
        "index_add": (lambda x: x.new_zeros(5, inner).index_add(0, places, x), [(a, 0)]),
        "attention": (
            lambda x: F.scaled_dot_product_attention(x, x.cos(), x.sin(), is_causal=True),
            [(numbers(2, 2, rows, 4, seed=seed), 2)],
        ),
        "cubes": (lambda x: torch.atan2(x, x + 1).pow(1.7).nan_to_num() + F.mish(x), [(a, 0)]),
        "max_pool": (lambda x: F.max_pool3d(x, 3, 1, 1), [(volume, draw.choice([2, 3, 4]))]),
        "prod": (lambda x: x.prod(cut), [(a, cut)]),
        "prod_all": (lambda x: x.prod(), [(a, cut)]),
        "complex": (
            lambda x, y: pairs(
                (as_complex(x) @ as_complex(y).conj()).sum(0) * as_complex(x).mean()
            ),
            [(numbers(rows, inner, 2, seed=seed), cut), (numbers(inner, cols, 2), None)],
        ),
        "complex_norm": (
            lambda x: as_complex(x).norm() + as_complex(x).norm(dim=0, p=1),
            [(pairs_of, 1)],
        ),
        "fft": (lambda x: pairs(torch.fft.fftn(x, dim=(1, 3), norm="ortho")), [(volume[0], 1)]),
        "rfft": (
            lambda x: pairs(torch.fft.rfftn(x, dim=(-3, -2, -1))),
            [(volume, draw.choice([2, 3, 4]))],
        ),
        "irfft": (
            lambda x: torch.fft.irfftn(as_complex(x), dim=(0, 1)),
            [(pairs_of, draw.choice([0, 1]))],
        ),
        "fft_slope": (
            lambda x: torch.autograd.grad(
                torch.fft.irfft2(torch.fft.rfft2(x).abs().sqrt() + 1j * x.sum(), s=x.shape)
                .pow(3)
                .sum(),
                x,
                create_graph=True,
            )[0],
            [(a, cut)],
        ),
        "hfft": (
            lambda x: torch.fft.hfft(x, dim=0) + torch.fft.ihfft(x, dim=0).abs().sum(),
            [(a, cut)],
        ),
        "pad": (lambda x: F.pad(x, (2, 1, 3, 2, 1, 1), mode="reflect"), [(volume, 2)]),
    }


def op_bits(mesh, seed: int) -> dict[str, str]:
    """Digests of value and gradients, float64 and float32."""
    print(f"seed {seed}")
    found = {}
    with reproducible():
        for name, (function, operands) in draw_ops(seed).items():
            for dtype in (torch.float64, torch.float32):
                arguments = []
                for value, dim in operands:
                    t = value.to(dtype)
                    if dim is not None:
                        t = sharded(t, mesh, dim)
                    arguments.append(t.requires_grad_())
                out = function(*arguments).to(dtype)
                gradients = torch.autograd.grad(out.square().sum() + out.sum(), arguments)
                found[f"{name} {dtype}"] = bits(out, *gradients)
    return found


@pytest.mark.parametrize("seed", [0, 1])
def test_every_op_has_the_same_bits_on_every_number_of_ranks(run_mesh, seed):
    seen = [run_mesh((size,), op_bits, seed=seed)[0] for size in (1, 2, 3, 4)]
    for name in seen[0]:
        assert len({found[name] for found in seen}) == 1, (name, [s[name] for s in seen])


def resize(**options) -> Callable[[Tensor], Tensor]:
    return lambda x: F.interpolate(x, **options)


def recurrent(kind: str, **options) -> Callable[..., Tensor]:
    """Output and last states of a layer as one tensor."""
    layer = getattr(nn, kind)(4, 3, batch_first=True, **options).double()

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        own = copy.deepcopy(layer).to(x.dtype)
        names = [name for name, _ in own.named_parameters()]
        out, last = torch.func.functional_call(own, dict(zip(names, weights, strict=True)), (x,))
        states = last if isinstance(last, tuple) else (last,)
        return torch.cat([t.flatten(1) for t in (out, *(s.transpose(0, 1) for s in states))], 1)

    run.weights = [numbers(*p.shape, seed=i) / 3 for i, p in enumerate(layer.parameters())]
    return run


def sampling(batch: int, points: tuple[int, ...], **options) -> Callable[..., Tensor]:
    """At points near their own places, some beyond the image."""
    options = {"align_corners": False} | options
    ndim = len(points)
    straight = torch.eye(ndim, ndim + 1).double().expand(batch, -1, -1)
    grid = F.affine_grid(straight, [batch, 1, *points], align_corners=False)

    def run(x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(x, grid, **options)

    run.weights = [grid + numbers(*grid.shape) / 20]
    return run


def slope(convolution: Callable[..., Tensor], shape: tuple[int, ...]) -> Callable[..., Tensor]:
    """The gradient of a small network's squares, to be differentiated again."""

    def run(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        energy = convolution(x, weight, bias, stride=(2, 1), padding=1).tanh().square().sum()
        grads = torch.autograd.grad(energy, [x, weight, bias], create_graph=True)
        return grads[0] + grads[1].square().sum() + grads[2].sum()

    run.weights = [numbers(*shape), numbers(3, seed=1)]
    return run


IMAGE, VOLUME, LINE = (2, 3, 17, 13), (1, 2, 9, 8, 7), (2, 3, 29)

WINDOWS = {
    "linear": (LINE, resize(scale_factor=1.7, mode="linear")),
    "bilinear": (IMAGE, resize(scale_factor=2, mode="bilinear")),
    "bilinear_corners": (IMAGE, resize(size=(29, 31), mode="bilinear", align_corners=True)),
    "bilinear_down": (IMAGE, resize(size=(7, 6), mode="bilinear")),
    "bilinear_antialias": (IMAGE, resize(size=(7, 6), mode="bilinear", antialias=True)),
    "bicubic": (IMAGE, resize(scale_factor=(1.5, 3), mode="bicubic")),
    "bicubic_corners": (IMAGE, resize(size=(9, 30), mode="bicubic", align_corners=True)),
    "bicubic_antialias": (IMAGE, resize(size=(5, 20), mode="bicubic", antialias=True)),
    "trilinear": (VOLUME, resize(scale_factor=(2, 1.5, 0.7), mode="trilinear")),
    "trilinear_in_plane": (VOLUME, resize(scale_factor=(1, 2, 2), mode="trilinear")),
    "nearest_exact": (IMAGE, resize(scale_factor=3, mode="nearest-exact")),
    "area": (IMAGE, resize(size=(7, 5), mode="area")),
    "average": (IMAGE, lambda x: F.avg_pool2d(x, 3, 1, 1)),
    "average_unpadded": (
        IMAGE,
        lambda x: F.avg_pool2d(x, (4, 3), (2, 1), 1, ceil_mode=True, count_include_pad=False),
    ),
    "average_divisor": (IMAGE, lambda x: F.avg_pool2d(x, 3, 2, ceil_mode=True, divisor_override=5)),
    "average_line": (LINE, lambda x: F.avg_pool1d(x, 5, 2, 2)),
    "average_volume": (VOLUME, lambda x: F.avg_pool3d(x, 3, 2, 1)),
    "cells_line": (LINE, lambda x: F.adaptive_avg_pool1d(x, 7)),
    "cells": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, (5, 4))),
    "one_row": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, (1, 4))),
    "one_cell": (IMAGE, lambda x: F.adaptive_avg_pool2d(x, 1)),
    "cells_volume": (VOLUME, lambda x: F.adaptive_avg_pool3d(x, (4, 5, 3))),
    "largest_cells": (IMAGE, lambda x: F.adaptive_max_pool2d(x, (5, 4))),
    "largest_cells_volume": (VOLUME, lambda x: F.adaptive_max_pool3d(x, (4, 5, 3))),
    "largest_index": (IMAGE, lambda x: F.max_pool2d(x, 3, 1, 1, return_indices=True)[0]),
    "power_average": (IMAGE, lambda x: F.lp_pool2d(x.abs() + 0.1, 3, 3, 2)),
    "local_response": (IMAGE, lambda x: F.local_response_norm(x, 3)),
    "cumsum": (LINE, lambda x: x.cumsum(2) + x.cumsum(1)),
    "cumprod": (LINE, lambda x: x.cumprod(2)),
    "cumprod_of_zeros": (LINE, lambda x: (x * (x > -1)).cumprod(2)),
    "logcumsumexp": (LINE, lambda x: x.logcumsumexp(2)),
    "lstm": ((3, 3, 4), recurrent("LSTM", num_layers=2)),
    "lstm_projected": ((1, 3, 4), recurrent("LSTM", bias=False, proj_size=2)),
    "gru": ((3, 2, 4), recurrent("GRU", bidirectional=True)),
    "rnn": ((3, 2, 4), recurrent("RNN", nonlinearity="relu")),
    "slope": ((1, 2, 8, 5), slope(F.conv2d, (3, 2, 3, 3))),
    "slope_transposed": ((1, 2, 8, 5), slope(F.conv_transpose2d, (2, 3, 3, 3))),
    "sampled": ((2, 3, 9, 8), sampling(2, (9, 8))),
    "sampled_cubic": (
        (1, 2, 9, 8),
        sampling(1, (9, 8), mode="bicubic", padding_mode="reflection"),
    ),
    "sampled_nearest": (
        (1, 2, 9, 8),
        sampling(1, (9, 8), mode="nearest", padding_mode="border", align_corners=True),
    ),
    "sampled_volume": ((1, 1, 6, 5, 4), sampling(1, (6, 5, 4), padding_mode="border")),
}


def window_inputs(mesh, full_value: Tensor) -> Iterator[Tensor]:
    """The input cut evenly, unevenly (with empty pieces too), and along two dims."""
    last = full_value.dim() - 1
    if mesh.ndim == 2:
        yield scatter(Cut(full_value, [Shard(last - 1 if last > 2 else 0), Shard(last)]), mesh)
        return
    yield sharded(full_value, mesh, last)
    sizes = uneven(full_value.size(last - 1), mesh.size(), seed=3 * last)
    yield sharded(full_value, mesh, last - 1, sizes)


def window_bits(mesh) -> dict[str, set[str]]:
    """Digests of value, input gradient and weight gradients for all cuts, by op and dtype."""
    found = {}
    with reproducible():
        for name, (shape, function) in WINDOWS.items():
            for dtype in (torch.float64, torch.float32):
                digests = set()
                for x in window_inputs(mesh, numbers(*shape).to(dtype)):
                    weights = [w.to(dtype).requires_grad_() for w in weights_of(function)]
                    out = function(x.requires_grad_(), *weights).to(dtype)
                    loss = out.square().sum() + out.sum()
                    digests.add(bits(out, *torch.autograd.grad(loss, [x, *weights])))
                found[f"{name} {dtype}"] = digests
    return found


def weights_of(function: Callable[..., Tensor]) -> list[Tensor]:
    return getattr(function, "weights", [])


def test_windows_scans_and_steps_have_the_same_bits_on_every_mesh(run_mesh):
    seen = [run_mesh(shape, window_bits)[0] for shape in MESHES]
    for name in seen[0]:
        assert len(set.union(*(found[name] for found in seen))) == 1, (
            name,
            [found[name] for found in seen],
        )


def window_values(mesh) -> None:
    """Value and gradients are the serial ones, and nothing is gathered."""
    with reproducible():
        for name, (shape, function) in WINDOWS.items():
            print(name)
            check_same_as_serial(
                function,
                [Cut(numbers(*shape), [Shard(len(shape) - 1)])],
                mesh,
                plain=weights_of(function),
                no_fallback=not name.startswith("sampled"),  # points may reach far: few rows
                second=name in ("bilinear", "bicubic", "average", "cells", "cumsum"),
                rtol=1e-7,
                atol=1e-7,
            )


def window_edges(mesh) -> None:
    """Half precision, integers, what is not finite, errors, and how much travels."""
    average = functools.partial(F.avg_pool2d, kernel_size=3, stride=1, padding=1)
    doubled = resize(scale_factor=2, mode="bilinear")
    with reproducible():
        for function in (average, doubled, functools.partial(F.adaptive_avg_pool2d, output_size=5)):
            large = numbers(2, 3, 16, 16).mul(100).half()
            assert_equal(
                function(sharded(large, mesh, 2)), function(large), "half", rtol=2e-3, atol=1e-1
            )
        whole = numbers(2, 3, 16, 16)
        whole[0, 0, 7, 7] = math.inf
        for function in (average, doubled, resize(size=(7, 7), mode="area")):
            assert_equal(function(sharded(whole, mesh, 3)), function(whole), "infinite")
        with pytest.raises(RuntimeError, match="kernel"):
            F.avg_pool2d(sharded(whole, mesh, 2), 0, 1)
        with pytest.raises(RuntimeError, match="output"):
            doubled(sharded(numbers(2, 3, 8, 0), mesh, 2))
        big = sharded(numbers(1, 4, 64, 64), mesh, 2).requires_grad_()
        with shardfield.report() as report:
            (average(big).sum() + doubled(big).sum()).backward()
        # float64 halo rows of two or three copies, not the tensor (128 KiB).
        assert not report.fallbacks
        assert report.bytes_sent < 60_000, report.bytes_sent


def values(mesh) -> None:
    """Value, gradients and second gradients are the serial ones."""
    with reproducible():
        for name, (function, operands) in draw_ops(2, decades=1).items():
            if name in ("norms", "losses", "bce"):  # the oracle cannot differentiate them twice
                continue
            second = name != "attention"  # PyTorch's own kernel has none
            cuts = [Cut(v, [Shard(d)]) for v, d in operands if d is not None]
            plain = [v for v, d in operands if d is None]
            print(name)
            check_same_as_serial(
                function,
                cuts,
                mesh,
                plain=plain,
                second=second,
                no_fallback=name != "prod_all",  # its last dim
                rtol=1e-7,
                atol=1e-7,
            )


def exactness(mesh) -> None:
    """A sum is rounded once; what is not finite, empty, integer or short works as usual."""
    with reproducible():
        x = sharded(torch.tensor([1e16, 1.0, -1e16, 3e-5, 1.0, -1.0]).double(), mesh, 0)
        assert_equal(x.sum(), torch.tensor(1.00003).double(), "sum", rtol=0, atol=1e-5)
        for value in (math.inf, math.nan):
            y = sharded(torch.tensor([1.0, value, 2.0, 3.0]), mesh, 0)
            assert (
                not torch.isfinite(y.sum()) and not torch.isfinite(y.outer(y).mm(y[:, None])).all()
            )
        assert_equal(sharded(torch.arange(7), mesh, 0).sum(), torch.tensor(21), "integers")
        assert_equal(sharded(numbers(0, 3), mesh, 0).sum(0), torch.zeros(3).double(), "empty")
        short = numbers(40, 3).bfloat16()
        exact = short.double().sum(0).bfloat16()
        assert_equal(sharded(short, mesh, 0).sum(0), exact, "bfloat16", rtol=0, atol=0)
        z = torch.complex(numbers(6), numbers(6, seed=1))
        assert_equal(sharded(z, mesh, 0).mean(), z.mean(), "complex")
        w = sharded(numbers(6, 3), mesh, 0)
        w.sigmoid_()
        assert_equal(w, numbers(6, 3).sigmoid(), "in place")
        zero = sharded(torch.zeros(6, 3).double(), mesh, 0).requires_grad_()
        assert_equal(torch.autograd.grad(zero.norm(), zero)[0], torch.zeros(6, 3).double(), "norm")
    assert not shardfield.is_reproducible()


@pytest.mark.parametrize(
    "case", [values, exactness, window_values, window_edges], ids=lambda case: case.__name__
)
@pytest.mark.parametrize("size", [1, 2, 3])
def test_in_reproducible_mode(run_mesh, case, size):
    run_mesh((size,), case)
