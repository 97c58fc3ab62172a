"""Microseconds an op costs over the plain op, beside torch's DTensor, in one process with one rank.

    python benchmarks/dispatch/dispatch_bench.py [--json out.json]

Figures are medians of interleaved repeats: plain and sharded calls alternate in blocks, so a
machine that is busy for a while slows both. Read the differences and ratios, not the absolute times.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from shardfield.domain_parallel import shard_tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

CALLS, REPEATS = 400, 41


def block_us(f: Callable[[], object], calls: int) -> float:
    """Microseconds per call over one block."""
    start = time.perf_counter_ns()
    for _ in range(calls):
        f()
    return (time.perf_counter_ns() - start) / calls / 1e3


def medians_us(
    variants: dict[str, Callable[[], object] | None], calls: int = CALLS
) -> dict[str, float]:
    """Median microseconds of each variant, blocks interleaved; NaN where a variant cannot run."""
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(REPEATS):
        for name, f in variants.items():
            if f is not None:
                times[name].append(block_us(f, calls))
    return {name: statistics.median(t) if t else float("nan") for name, t in times.items()}


def runnable(f: Callable[[], object]) -> Callable[[], object] | None:
    """The function, or None when this variant raises."""
    try:
        f()
    except Exception:
        return None
    return f


def op_cases() -> dict[str, Callable[[dict[str, torch.Tensor]], Callable[[], object]]]:
    """Op name to a maker of its call for one set of tensors."""
    weights = {"w": torch.randn(8, 8), "b": torch.randn(8), "k": torch.randn(4, 4, 3, 3)}
    return {
        "add": lambda t: lambda: t["x"] + t["x"],
        "mul": lambda t: lambda: t["x"] * 2.0,
        "relu": lambda t: lambda: torch.relu(t["x"]),
        "gelu": lambda t: lambda: torch.nn.functional.gelu(t["x"]),
        "transpose": lambda t: lambda: t["x"].transpose(0, 1),
        "view": lambda t: lambda: t["x"].view(4, 2, 4),
        "unsqueeze": lambda t: lambda: t["x"].unsqueeze(0),
        "linear": lambda t: (
            lambda: torch.nn.functional.linear(
                t["x"], t.get("w", weights["w"]), t.get("b", weights["b"])
            )
        ),
        "layer_norm": lambda t: lambda: torch.nn.functional.layer_norm(t["x"], (8,)),
        "mean": lambda t: lambda: t["x"].mean(),
        "conv2d": lambda t: (
            lambda: torch.nn.functional.conv2d(t["img"], t.get("k", weights["k"]), padding=1)
        ),
    }


def small_net() -> torch.nn.Module:
    """Convolutions, norms and activations on tiny tensors."""
    torch.manual_seed(0)
    layers: list[torch.nn.Module] = []
    for _ in range(4):
        layers += [torch.nn.Conv2d(8, 8, 3, padding=1), torch.nn.GroupNorm(2, 8), torch.nn.GELU()]
    return torch.nn.Sequential(*layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="also write the figures to this file")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    mesh = init_device_mesh("cpu", (1,))
    plain = {"x": torch.randn(4, 8), "img": torch.randn(1, 4, 16, 16)}
    ours = {
        "x": shard_tensor(plain["x"], mesh, [Shard(0)]),
        "img": shard_tensor(plain["img"], mesh, [Shard(2)]),
    }
    theirs = {
        "x": distribute_tensor(plain["x"], mesh, [Shard(0)]),
        "img": distribute_tensor(plain["img"], mesh, [Shard(2)]),
    }
    for name, shape in {"w": (8, 8), "b": (8,), "k": (4, 4, 3, 3)}.items():
        theirs[name] = distribute_tensor(torch.randn(shape), mesh, [Replicate()])

    rows = {}
    print(f"{'op':12} {'plain us':>9} {'ours over':>10} {'DTensor over':>13}")
    with torch.no_grad():
        for name, make in op_cases().items():
            t = medians_us(
                {
                    "plain": make(plain),
                    "ours": runnable(make(ours)),
                    "dtensor": runnable(make(theirs)),
                }
            )
            rows[name] = {
                "plain_us": t["plain"],
                "over_us": t["ours"] - t["plain"],
                "dtensor_over_us": t["dtensor"] - t["plain"],
            }
            print(
                f"{name:12} {t['plain']:9.2f} {rows[name]['over_us']:10.2f} {rows[name]['dtensor_over_us']:13.2f}",
                flush=True,
            )

    net, image = small_net(), torch.randn(2, 8, 32, 32)
    sharded = shard_tensor(image, mesh, [Shard(2)])
    t = medians_us(
        {
            "plain": lambda: net(image).sum().backward(),
            "ours": lambda: net(sharded).sum().backward(),
        },
        calls=5,
    )
    rows["net"] = {"plain_us": t["plain"], "ratio": t["ours"] / t["plain"]}
    print(f"net forward+backward: {t['plain']:.0f} us plain, ratio {rows['net']['ratio']:.3f}")
    if args.json:
        with open(args.json, "w") as f:
            json.dump(rows, f, indent=1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
