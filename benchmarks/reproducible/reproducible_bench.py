"""What reproducible mode costs: the same step with and without it, interleaved, in one process.

    python benchmarks/reproducible/reproducible_bench.py [--json out.json]

Ratios of medians on one rank; the exchanges of several ranks add a small all-reduce per operand and
float64 sums (docs/reproducible.md).
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import shardfield

REPEATS = 15


def ratio(step: Callable[[], object]) -> float:
    """Median time in reproducible mode over the usual one."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(REPEATS):
        for mode in times:
            shardfield.set_reproducible(mode)
            start = time.perf_counter()
            step()
            times[mode].append(time.perf_counter() - start)
    shardfield.set_reproducible(False)
    return statistics.median(times[True]) / statistics.median(times[False])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--json", help="also write the ratios here")
    path = arguments.parse_args().json
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    torch.manual_seed(0)

    matrix = shard_tensor(torch.randn(1000, 1000), mesh, [Shard(0)])

    def training(net: nn.Module, *shape: int) -> Callable[[], None]:
        x = shard_tensor(torch.randn(shape), mesh, [Shard(len(shape) - 2)])

        def step() -> None:
            net(x).square().mean().backward()

        return step

    ratios = {
        "sum of 1 M elements": ratio(matrix.sum),
        "linear 4096 x 256 -> 256, forward and backward": ratio(
            training(nn.Linear(256, 256), 4096, 256)
        ),
        "conv 16 -> 16, k3, 64 x 64, forward and backward": ratio(
            training(nn.Conv2d(16, 16, 3, padding=1), 2, 16, 64, 64)
        ),
        "conv, group norm, GELU, twice, forward and backward": ratio(
            training(
                nn.Sequential(
                    *[
                        layer
                        for _ in range(2)
                        for layer in (nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU())
                    ]
                ),
                2,
                8,
                64,
                64,
            )
        ),
    }
    for name, value in ratios.items():
        print(f"{name:55} {value:6.1f} x")
    if path:
        with open(path, "w", encoding="utf-8") as file:
            json.dump(ratios, file, indent=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
