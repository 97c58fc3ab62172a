"""How far float32 gradients of the demo's network are from float64's, plain and on 2 x 2 ranks.

    python benchmarks/rounding/demo_gradients_bench.py [--millimetres 2]

Relative errors (2-norm over a parameter), the smallest and the largest of all parameters. Plain
float64 needs tens of GB at 1 mm: use 2 mm or coarser (docs/demo.md).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "python"))
from brain import data
from brain.model import UNet, dice_and_cross_entropy

Gradients = dict[str, torch.Tensor]


def gradients(scan: torch.Tensor, labels: torch.Tensor) -> Gradients:
    """Those of the demo's first weights, in float64."""
    torch.manual_seed(0)
    model = UNet().to(scan.dtype)
    dice_and_cross_entropy(model(scan), labels).backward()
    return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}


def on_a_rank(rank: int, store: str, millimetres: int, out: str) -> None:
    """One of four ranks that split the volume 2 x 2; rank 0 saves the gradients."""
    from shardfield.domain_parallel import shard_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, 4), rank=rank, world_size=4)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2, 2))
    brain = data.load(millimetres, torch.float32)
    scan = shard_tensor(brain.scan, mesh, [Shard(2), Shard(3)])
    found = gradients(scan, shard_tensor(brain.labels, mesh, [Shard(1), Shard(2)]))
    if rank == 0:
        torch.save(found, out)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--millimetres", type=int, default=2)
    millimetres = arguments.parse_args().millimetres
    plain = {}
    for dtype in (torch.float64, torch.float32):
        brain = data.load(millimetres, dtype)
        plain[dtype] = gradients(brain.scan, brain.labels)
    exact = plain[torch.float64]
    with tempfile.TemporaryDirectory() as folder:
        out = f"{folder}/gradients.pt"
        mp.spawn(on_a_rank, (f"{folder}/store", millimetres, out), nprocs=4)
        sharded = torch.load(out)
    for title, found in (("plain", plain[torch.float32]), ("2 x 2 ranks", sharded)):
        errors = [float((found[n] - g).norm() / g.norm()) for n, g in exact.items()]
        print(
            f"{title:12} float32 gradients: {min(errors):.1e} to {max(errors):.1e} from float64's"
        )


if __name__ == "__main__":
    main()
