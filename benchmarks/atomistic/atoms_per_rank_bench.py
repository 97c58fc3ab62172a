"""Atoms that fit at equal memory: MACE energies and forces of quartz on 1 device and on R ranks.

Every rank runs as a process of its own, joined by Gloo, on this machine. Peak memory is that of
everything allocated by PyTorch between the positions and the forces: neighbours, inputs, forward
and backward; weights are apart. "whole field" is what a rank needs that computes its own atoms from
a copy of all atoms within the reach of all layers (one exchange, no communication between layers).

    python benchmarks/atomistic/atoms_per_rank_bench.py --ranks 1 2 4 16 --cells 27 64
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import warnings
from datetime import timedelta
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = [str(ROOT / "examples" / "python"), str(ROOT / "tests" / "python")]
sys.path[:0] = FOLDERS
from brain.memory import peak_memory  # noqa: E402  before torch: it quietens the profiler's log

# isort: split
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402

TIMEOUT = timedelta(minutes=20)


def repeats(cells: int) -> tuple[int, int, int]:
    """Three factors of a number of cells, as equal as they can be."""
    shapes = [
        (a, b, cells // (a * b))
        for a in range(1, cells + 1)
        for b in range(1, cells // a + 1)
        if cells % (a * b) == 0
    ]
    return min(shapes, key=lambda s: (max(s) - min(s), s))


def evaluate(rank: int, ranks: int, port: int, cells: int, options: dict, path: str) -> None:
    """One energy with forces on this rank; writes atoms, peak, seconds and energy."""
    from atomistic.model import small_mace
    from atomistic.on_ranks import SumsOnOwners, sharded_inputs, whole_inputs
    from atomistic.quartz import quartz
    from torch.distributed.device_mesh import init_device_mesh

    warnings.filterwarnings("ignore", message="The TorchScript type system")
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    mesh = init_device_mesh("cpu", (ranks,))
    cutoff = options["cutoff"]
    model = small_mace(cutoff, options["channels"], options["layers"])

    def run(repeat: tuple[int, int, int]) -> float:
        crystal = quartz(*repeat)
        if ranks == 1:
            out = model(whole_inputs(crystal, cutoff))
        else:
            data, atoms = sharded_inputs(crystal, cutoff, mesh)
            with SumsOnOwners(atoms):
                out = model(data)
        return out["interaction_energy"].item()

    run((2, 2, 1))  # TorchScript compiles in the first run
    dist.barrier()
    start = time.perf_counter()
    with peak_memory() as peak:
        energy = run(repeats(cells))
    seconds = time.perf_counter() - start
    result = {"atoms": 9 * cells, "peak": peak.bytes, "seconds": seconds, "energy": energy}
    Path(path, f"{rank}.pickle").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def measure(ranks: int, cells: int, options: dict) -> list[dict]:
    """What every rank measured."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with tempfile.TemporaryDirectory() as folder:
        arguments = (ranks, store.port, cells, options, folder)
        mp.start_processes(evaluate, arguments, ranks, start_method="forkserver")
        return [pickle.loads(Path(folder, f"{r}.pickle").read_bytes()) for r in range(ranks)]


def copied_atoms(ranks: int, cells: int, options: dict) -> int:
    """Atoms that the fullest rank holds if it copies what all layers reach."""
    from atomistic.quartz import quartz

    from shardfield.graph import HaloGraph, neighbor_list, partition_nodes

    crystal = quartz(*repeats(cells))
    found = neighbor_list(crystal.positions, crystal.cell.array, options["cutoff"])
    places = crystal.get_positions(wrap=True)
    nothing = np.zeros((2, 0), np.int64)
    labels = partition_nodes(nothing, len(crystal), ranks, "hilbert", coordinates=places)
    graph = HaloGraph(found.edge_index, len(crystal), labels, ranks, hops=options["layers"])
    return max(len(graph.nodes(part).nodes) for part in range(ranks))


def main() -> None:
    """Measure and print the table; the last column is atoms on R ranks over atoms on one device."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--cells", type=int, nargs="+", default=[8], help="cells of a rank")
    parser.add_argument("--cutoff", type=float, default=5.0, help="Angstrom")
    parser.add_argument("--channels", type=int, default=16)
    parser.add_argument("--layers", type=int, default=2)
    arguments = parser.parse_args()
    # MACE takes seconds to import: once in the fork server instead of once per rank.
    os.environ["PYTHONPATH"] = os.pathsep.join([*FOLDERS, os.environ.get("PYTHONPATH", "")])
    multiprocessing.get_context("forkserver").set_forkserver_preload(["mace_packages"])
    options = {k: getattr(arguments, k) for k in ("cutoff", "channels", "layers")}
    per_atom: dict[int, float] = {}
    print(f"quartz, MACE {options}, float64")
    print("ranks   atoms  atoms/rank  peak MiB of fullest rank  KiB/atom  gain  copied  seconds")
    for cells in arguments.cells:
        for ranks in sorted({1, *arguments.ranks}):
            results = measure(ranks, cells * ranks, options)
            peak = max(r["peak"] for r in results)
            atoms = results[0]["atoms"]
            if ranks == 1:
                per_atom[cells] = peak / atoms
            copied = copied_atoms(ranks, cells * ranks, options) if ranks > 1 else atoms
            print(
                f"{ranks:5} {atoms:7} {atoms // ranks:11} {peak / 2**20:25.1f} "
                f"{peak / 2**10 / (atoms / ranks):9.1f} {per_atom[cells] * atoms / peak:5.2f} "
                f"{atoms / copied:7.2f} {max(r['seconds'] for r in results):8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
