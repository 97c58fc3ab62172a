"""Starts the ranks of the example, or joins those that torchrun started."""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from .train import Result, Task, run_sharded

TIMEOUT = timedelta(minutes=5)


def under_torchrun() -> bool:
    """Whether this process is one of torchrun's."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def join(task: Task) -> Result:
    """Run as one of torchrun's ranks."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=TIMEOUT)
    try:
        return run_sharded(task)
    finally:
        dist.destroy_process_group()


def spawn(task: Task, ranks: int, out: Path) -> Result:
    """Start the ranks on this machine and wait; a failing rank's traceback is raised here."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    path = out / "cortex_ranks.pickle"
    mp.start_processes(_spawned, (task, ranks, store.port, str(path)), ranks, start_method="spawn")
    return pickle.loads(path.read_bytes())


def _spawned(rank: int, task: Task, ranks: int, port: int, path: str) -> None:
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        result = run_sharded(task)
        if rank == 0:
            Path(path).write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()
