"""Random draws for the property tests: an operator, its inputs, and how they are cut.

Everything follows from one integer, so that a failure is repeated by its seed: every rank draws
the same. The base seed is fixed; SHARDFIELD_SEED=<number> replaces it, SHARDFIELD_SEED=random
draws a fresh one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from oracle import Cut, check_same_as_serial, numbers
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement, Replicate, Shard

DEFAULT_SEED = 20261129


@dataclass
class Drawn:
    """One draw: `function(x, *plain)`, and which dims of x may be cut."""

    text: str
    function: Any
    x: Tensor
    cuttable: Sequence[int]
    plain: list[Tensor] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)


def base_seed() -> int:
    """The seed of this run, printed by every property test."""
    wanted = os.environ.get("SHARDFIELD_SEED", str(DEFAULT_SEED))
    return random.SystemRandom().randrange(10**9) if wanted == "random" else int(wanted)


def composition(rng: random.Random, total: int, parts: int) -> list[int]:
    """Piece sizes that add up to `total`: any, with empty pieces not rare."""
    if rng.random() < 0.3:
        sizes = [0] * parts
        sizes[rng.randrange(parts)] = total
        for _ in range(rng.randrange(total + 1)):
            i, j = rng.randrange(parts), rng.randrange(parts)
            if sizes[i]:
                sizes[i] -= 1
                sizes[j] += 1
        return sizes
    marks = sorted(rng.randint(0, total) for _ in range(parts - 1))
    return [b - a for a, b in zip([0, *marks], [*marks, total], strict=True)]


def draw_cut(rng: random.Random, drawn: Drawn, mesh: DeviceMesh) -> Cut:
    """How the input is cut: each mesh axis takes a dim (two may share one), in any sizes."""
    dims = [rng.choice(list(drawn.cuttable)) for _ in range(mesh.ndim)]
    placements: list[Placement] = [Shard(d) for d in dims]
    if mesh.ndim > 1 and rng.random() < 0.15:
        placements[rng.randrange(mesh.ndim)] = Replicate()
    sizes: dict[int, Sequence[int]] = {}
    if len(set(dims)) == len(dims) and rng.random() < 0.6:
        sizes = {
            axis: composition(rng, drawn.x.size(p.dim), mesh.size(axis))
            for axis, p in enumerate(placements)
            if isinstance(p, Shard)
        }
    return Cut(drawn.x, placements, sizes)


def check_draws(
    mesh: DeviceMesh, draw: Callable[[random.Random], Drawn], seeds: Sequence[int]
) -> None:
    """Draws once per seed and compares with serial; the error names seed, operator and cut."""
    wrong = []
    for seed in seeds:
        rng = random.Random(seed)
        drawn = draw_valid(rng, draw)
        cut = draw_cut(rng, drawn, mesh)
        story = (
            f"SHARDFIELD_SEED={seed}: {drawn.text}, x {tuple(drawn.x.shape)}, "
            f"{list(cut.placements)} sizes {cut.sizes}"
        )
        try:
            check_same_as_serial(
                drawn.function, [cut], mesh, plain=drawn.plain, seed=seed, **drawn.options
            )
        except AssertionError as error:  # the ranks stay in step: go on, and tell of all
            wrong.append(f"{story}: {error}")
        except Exception as error:
            raise RuntimeError(f"{story}: {type(error).__name__}: {error}") from error
    assert not wrong, f"{len(wrong)} of {len(seeds)} draws differ:\n" + "\n".join(wrong[:5])


def draw_valid(rng: random.Random, draw: Callable[[random.Random], Drawn]) -> Drawn:
    """The first draw that the plain operator accepts."""
    for _ in range(100):
        drawn = draw(rng)
        try:
            with torch.no_grad():
                out = drawn.function(drawn.x, *drawn.plain)
        except (RuntimeError, ValueError):
            continue
        outputs = out if isinstance(out, (tuple, list)) else [out]
        if all(o.numel() for o in outputs):
            return drawn
    raise AssertionError("no valid parameters in 100 draws")


def shape_of(rng: random.Random, nd: int, longest: int = 12) -> list[int]:
    """Spatial lengths: one long dim, the others short."""
    lengths = [rng.randint(2, 5) for _ in range(nd)]
    lengths[rng.randrange(nd)] = rng.randint(3, longest)
    return lengths


def each(rng: random.Random, nd: int, low: int, high: int) -> tuple[int, ...]:
    """One number per spatial dim."""
    return tuple(rng.randint(low, high) for _ in range(nd))


def values(rng: random.Random, *shape: int) -> Tensor:
    """Normal random numbers that follow from the draw."""
    return numbers(*shape, seed=rng.randrange(10**6))
