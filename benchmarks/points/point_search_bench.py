"""Searches of cut points against one device: time, and bytes beside the points that are needed.

    python benchmarks/points/point_search_bench.py [--points 200000] [--ranks 2]

Points lie in a cube, in parts along a Hilbert curve, and in an order drawn at random. Every rank has
one thread; so has the search on one device. Ratios are of the same run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

NEIGHBOURS = 8


def seconds(step: Callable[[], object]) -> float:
    """The best of three calls."""
    times = []
    for _ in range(3):
        dist.barrier()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times)


def ordered(points: torch.Tensor, parts: int) -> torch.Tensor:
    """The points in parts along a Hilbert curve."""
    from shardfield.graph import partition_nodes

    no_edges = np.zeros((2, 0), np.int64)
    part = partition_nodes(no_edges, len(points), parts, "hilbert", coordinates=points.numpy())
    return points[torch.from_numpy(np.argsort(part, kind="stable"))]


def needed_bytes(points: torch.Tensor, ranks: int, radius: float) -> int:
    """Coordinates and numbers of the points that have a neighbour on each other rank."""
    from shardfield.points import knn

    pieces = points.chunk(ranks)
    count = sum(
        int((knn(theirs, own, 1)[1] <= radius).sum())
        for i, own in enumerate(pieces)
        for j, theirs in enumerate(pieces)
        if i != j
    )
    return count * (points.size(1) * points.itemsize + 8)


def on_a_rank(rank: int, store: str, ranks: int, count: int) -> None:
    """Rank 0 prints."""
    from shardfield.domain_parallel import shard_tensor

    import shardfield
    from shardfield.points import knn, radius_search

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,))
    drawn = torch.rand(count, 3, generator=torch.Generator().manual_seed(0))
    radius = (NEIGHBOURS / (4.19 * count)) ** (1 / 3)
    for name, points in (("hilbert", ordered(drawn, ranks)), ("random", drawn)):
        cut = shard_tensor(points, mesh, [Shard(0)])
        searches: dict[str, Callable[[torch.Tensor], object]] = {
            "knn": lambda x: knn(x, x, NEIGHBOURS),
            "radius": lambda x: radius_search(x, x, radius),
        }
        for search, call in searches.items():
            with shardfield.report() as report:
                call(cut)
            total = torch.tensor(float(report.bytes_sent))
            dist.all_reduce(total)
            ratio = seconds(lambda call=call, x=cut: call(x)) / seconds(
                lambda call=call, x=points: call(x)
            )
            if rank == 0:
                print(
                    f"{name:8} {search:7} time {ratio:.2f} of one device (1/{ranks} = {1 / ranks:.2f})"
                    f"  sent {total.item() / points.nbytes:.3f} of all coordinates,"
                    f" needed {needed_bytes(points, ranks, radius) / points.nbytes:.3f}"
                )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Runs the ranks as processes."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--points", type=int, default=200_000)
    arguments.add_argument("--ranks", type=int, default=2)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_a_rank, (f"{folder}/store", given.ranks, given.points), nprocs=given.ranks)


if __name__ == "__main__":
    main()
