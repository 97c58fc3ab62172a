"""Attention with cut tokens against one device: time, bytes sent, and memory kept for backward.

    python benchmarks/attention/ring_attention_bench.py [--tokens 4096] [--ranks 2]

Every rank has one thread; so has the serial run. Ratios are of the same run.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

HEADS, FEATURES = 8, 64


def seconds(step: Callable[[], object], repeats: int = 3) -> float:
    """The best of some calls after one to warm up."""
    step()
    times = []
    for _ in range(repeats):
        dist.barrier()
        begin = time.perf_counter()
        step()
        times.append(time.perf_counter() - begin)
    return min(times)


def kept_bytes(step: Callable[[], object]) -> int:
    """Bytes that autograd keeps for backward, each memory once."""
    kept: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        own = t.to_local() if hasattr(t, "to_local") else t
        kept[own.data_ptr()] = own.nbytes
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        step()
    return sum(kept.values())


def on_a_rank(rank: int, store: str, ranks: int, tokens: int) -> None:
    """Rank 0 prints."""
    from shardfield.domain_parallel import scatter_tensor

    import shardfield

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (ranks,))
    for dtype in (torch.float32, torch.bfloat16):
        for causal in (False, True):
            torch.manual_seed(0)
            plain = [torch.randn(1, HEADS, tokens, FEATURES, dtype=dtype) for _ in range(4)]
            results = []
            for tensors in (plain, [scatter_tensor(t, 0, mesh, [Shard(2)]) for t in plain]):
                q, k, v = (t.clone().detach().requires_grad_() for t in tensors[:3])

                def forward(q=q, k=k, v=v, causal=causal) -> torch.Tensor:
                    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)

                def step(forward=forward, grad=tensors[3]) -> None:
                    forward().backward(grad)

                with shardfield.report() as report:
                    step()
                results.append((seconds(step), kept_bytes(forward), report.bytes_sent))
            (serial_s, serial_kept, _), (own_s, own_kept, sent) = results
            total = torch.tensor(float(sent))
            dist.all_reduce(total)
            # Forward keys and values; backward queries, gradients, two float32 and the result.
            row = HEADS * (5 * FEATURES * plain[0].itemsize + 2 * 4)
            least = row * tokens * (ranks - 1) * (0.5 if causal else 1)
            if rank == 0:
                print(
                    f"{str(dtype)[6:]:9} {'causal' if causal else 'full':7}"
                    f" time {own_s / serial_s:.2f} of serial (1/{ranks} = {1 / ranks:.2f})"
                    f"  kept {own_kept / serial_kept:.3f}  bytes {total.item() / least:.3f} of the least"
                )
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Runs the ranks as processes."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--tokens", type=int, default=4096)
    arguments.add_argument("--ranks", type=int, default=2)
    given = arguments.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(on_a_rank, (f"{folder}/store", given.ranks, given.tokens), nprocs=given.ranks)


if __name__ == "__main__":
    main()
