#!/usr/bin/env python3
"""Train a 3-D U-Net on a real brain scan whose volume is shared by several processes.

The script starts its own ranks: first the plain serial run, then four ranks that split the volume
2 x 2 over two of its axes, then three that split one axis. It compares the losses step by step and
reports memory, traffic and times; everything is kept in ``out/``. Started by torchrun it takes the
ranks it is given instead. See docs/demo.md.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from pathlib import Path

# isort: off
import brain.memory  # noqa: F401  Before torch: it quietens the profiler's log.
import torch

# isort: on
from brain.launch import Launcher, torchrun_plan
from brain.ranks import Plan, export

BOUND = {torch.float32: 1e-4, torch.float64: 1e-9}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--full", action="store_true", help="the 1 mm volume, 197 x 233 x 189")
    size.add_argument("--millimetres", type=int, default=4, help="edge of a voxel (default 4)")
    parser.add_argument("--dtype", choices=("float32", "float64"), default="float32")
    parser.add_argument("--steps", type=int, default=32, help="training steps (default 32)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results")
    parser.add_argument("--cpp", type=Path, help="the built C++ twin; compared when given")
    return parser.parse_args()


def plans(arguments: argparse.Namespace, path: Path) -> list[Plan]:
    """List the serial run and the sharded ones to put beside it."""
    cores = len(os.sched_getaffinity(0))

    def plan(title: str, mesh: tuple[int, ...], dims: tuple[int, ...]) -> Plan:
        return Plan(title, mesh, dims, arguments.steps, str(path), max(1, cores // math.prod(mesh)))

    given = torchrun_plan()
    if given:
        return [plan("serial", (), ()), plan(*given)]
    return [
        plan("serial", (), ()),
        plan("4 ranks, 2 x 2", (2, 2), (2, 3)),
        plan("3 ranks, one axis", (3,), (2,)),
    ]


def main() -> int:
    """Run everything; 0 when every comparison holds."""
    arguments = parse()
    dtype = getattr(torch, arguments.dtype)
    millimetres = 1 if arguments.full else arguments.millimetres
    arguments.out.mkdir(parents=True, exist_ok=True)
    path = arguments.out / "brain_unet.pt"

    launcher = Launcher()
    if launcher.leads:
        from brain import data
        from brain.model import UNet

        brain = data.load(millimetres, dtype)
        (arguments.out / "brain_volume_licence.txt").write_text(
            data.licence_note(), encoding="utf-8"
        )
        torch.manual_seed(0)
        export(str(path), brain.scan, brain.labels, UNet().to(dtype), arguments.steps)
    outcomes = [(plan, launcher.run(plan)) for plan in plans(arguments, path)]
    if not launcher.leads:
        return 0

    # Spawned ranks import this file, but need neither tables nor pictures.
    from brain.compare import compare_with_cpp, cuts_of, gather_runs
    from brain.plot import draw
    from brain.report import Header, Report, dice_scores

    runs = gather_runs(outcomes, BOUND[dtype], dtype.itemsize)
    if arguments.cpp:
        runs.cpp = compare_with_cpp(arguments.cpp, path, arguments.out, runs, BOUND[dtype])
    labels = brain.labels[0].numpy()
    dice = {plan.title: dice_scores(ranks[0].prediction, labels) for plan, ranks in outcomes}
    report = Report(brain, Header(arguments.dtype, millimetres, dice), runs)
    report.write(arguments.out)
    drawn = [
        (run, cuts_of("piece_in", 0, plan, ranks), ranks[0].prediction)
        for run, (plan, ranks) in zip(runs.sharded, outcomes[1:], strict=True)
    ]
    draw(arguments.out / "brain_unet.png", brain, runs, drawn)
    report.show()
    print(f"Kept in {arguments.out}: brain_unet.png, .txt, .json, .pt, brain_volume_licence.txt")
    return 0 if runs.hold else 1


if __name__ == "__main__":
    sys.exit(main())
