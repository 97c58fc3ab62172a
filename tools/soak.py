#!/usr/bin/env python3
"""Trains for thousands of steps on sharded tensors and looks whether anything grows.

Per rank, between the end of the warm-up and the last step: resident bytes, open handles, threads. The
step holds what a training step holds: convolutions with halos, norms, linear layers, an optimizer, a
loss for the log, a view with an in-place write, and now and then a checkpoint.

    python tools/soak.py --ranks 2 --steps 5000
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import gc
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

MOST_BYTES = 8 << 20


def usage() -> dict[str, int]:
    """What this process holds now, after giving back what the allocator keeps."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "bytes": int(status["VmRSS"].split()[0]) * 1024,
        "handles": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
    }


def run(warm: int, steps: int) -> dict[str, int]:
    """Growth from step `warm` to the last one on this rank. Collective over all ranks."""
    from fault_injection import Net, sample
    from shardfield.distributed import fused_all_reduce
    from shardfield.domain_parallel import shard_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    from shardfield.checkpoint import save_sharded

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    whole, target = sample()
    holder = tempfile.TemporaryDirectory(prefix="shardfield-soak-")
    folders: list[Any] = [holder.name]
    dist.broadcast_object_list(folders, 0)
    before: dict[str, int] = {}
    for step in range(steps):
        if step == warm:
            before = usage()
        x = shard_tensor(whole, mesh, [Shard(2)])
        y = net(x).clone()
        y[:, :, 3:9] *= 0.5
        F.mse_loss(y, target).backward()
        optimizer.step()
        optimizer.zero_grad()
        fused_all_reduce(torch.ones(3) * step)
        y.detach().full_tensor().amax().item()
        if step % 50 == 0:
            save_sharded(folders[0], {"net": net, "step": step}, rng=False)
    after = usage()
    dist.barrier()
    holder.cleanup()
    return {key: after[key] - before[key] for key in after}


def _rank(rank: int, ranks: int, port: int, warm: int, steps: int, results: Any) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    limit = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, None, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=limit)
    results.put((rank, run(warm, steps)))
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--warm", type=int, default=500)
    options = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    results = context.Queue()
    arguments = (options.ranks, store.port, options.warm, options.steps, results)
    processes = [context.Process(target=_rank, args=(r, *arguments)) for r in range(options.ranks)]
    for p in processes:
        p.start()
    grown = False
    for _ in processes:
        rank, growth = results.get()
        print(f"rank {rank}: growth after {options.steps} steps: {growth}")
        grown |= growth["bytes"] > MOST_BYTES or growth["handles"] > 0 or growth["threads"] > 0
    for p in processes:
        p.join()
    return int(grown)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
