#!/usr/bin/env python3
"""Energy and forces of a quartz crystal by MACE, its atoms shared by several processes.

    torchrun --nproc-per-node 4 examples/python/mace_quartz.py --cells 4 4 3

Every rank says what it holds, and compares with one device. See docs/atomistic.md.
"""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta

import torch.distributed as dist
from atomistic.model import small_mace
from atomistic.on_ranks import SumsOnOwners, sharded_inputs, whole_inputs
from atomistic.quartz import quartz
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

BOUND = 1e-9


def compare(mesh: DeviceMesh, cells: list[int], cutoff: float) -> float:
    """The larger of the relative differences of energy and forces from one device's."""
    crystal, model = quartz(*cells), small_mace(cutoff)
    data, atoms = sharded_inputs(crystal, cutoff, mesh)
    with SumsOnOwners(atoms):
        out = model(data)
    edges = data["edge_index"].to_local().shape[1]
    print(f"rank {mesh.get_rank()}: {len(atoms.own)} of {len(atoms)} atoms, {edges} edges")
    forces = atoms.gather(out["forces"])
    want = model(whole_inputs(crystal, cutoff))
    energy = (out["interaction_energy"] / want["interaction_energy"] - 1).abs().item()
    force = ((forces - want["forces"]).abs().max() / want["forces"].abs().max()).item()
    print(f"rank {mesh.get_rank()}: energy differs by {energy:.1e}, forces by {force:.1e}")
    return max(energy, force)


def main() -> int:
    """Run on torchrun's ranks; 0 when energy and forces equal one device's."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cells", type=int, nargs=3, default=[3, 3, 3], help="along a, b and c")
    parser.add_argument("--cutoff", type=float, default=5.0, help="Angstrom")
    arguments = parser.parse_args()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    worst = compare(mesh, arguments.cells, arguments.cutoff)
    dist.barrier()
    dist.destroy_process_group()
    return 0 if worst <= BOUND else 1


if __name__ == "__main__":
    sys.exit(main())
