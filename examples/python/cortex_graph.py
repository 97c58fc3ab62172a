#!/usr/bin/env python3
"""Train a mesh network on a real cortical surface whose vertices are shared by several processes.

The script starts its own ranks: first the plain serial run, then four that each hold a piece of the
surface. It compares the losses step by step and draws truth, prediction and pieces into ``out/``.
Started by torchrun it takes the ranks it is given instead. See docs/demo.md.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path

from cortex.launch import join, spawn, under_torchrun
from cortex.train import Result, Task, run_serial

BOUND = {"float32": 1e-4, "float64": 1e-9}
COMPARED_STEPS = 10


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", choices=("curvature", "sulcus"), default="curvature")
    parser.add_argument("--ranks", type=int, default=4, help="without torchrun (default 4)")
    parser.add_argument("--steps", type=int, default=30, help="training steps (default 30)")
    parser.add_argument("--dtype", choices=tuple(BOUND), default="float64")
    parser.add_argument("--coarser", type=int, default=0, help="1: 2562 vertices, 2: 642")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for results")
    return parser.parse_args()


def compare(task: Task, serial: Result, ranks: Result, out: Path) -> bool:
    """Print, keep and draw the comparison; whether it holds."""
    from cortex.data import licence_note
    from cortex.picture import correlation, draw

    relative = [abs(a - b) / b for a, b in zip(ranks.losses, serial.losses, strict=True)]
    worst = max(relative[:COMPARED_STEPS])
    holds = worst <= BOUND[task.dtype] and not ranks.fallbacks
    left, right = task.surface("left"), task.surface("right")
    scores = {
        "left": correlation(ranks.prediction, left.target[:, 0].numpy()),
        "right": correlation(ranks.held_out, right.target[:, 0].numpy()),
    }
    for step, pair in enumerate(zip(serial.losses, ranks.losses, strict=True)):
        print(f"step {step + 1:3}  serial {pair[0]:.9f}  ranks {pair[1]:.9f}  {relative[step]:.0e}")
    print(f"worst of the first {COMPARED_STEPS}: {worst:.1e}, allowed {BOUND[task.dtype]:.0e}")
    print(f"gathers: {ranks.fallbacks or 'none'}; borrowed vertices per rank: {ranks.halos}")
    print("correlation, trained side {left:.3f}, other side {right:.3f}".format(**scores))
    figures = {
        "vertices": len(left.points),
        "edges": left.edges.shape[0],
        "holds": holds,
        "serial": serial.losses,
        "ranks": ranks.losses,
        "worst": worst,
        "fallbacks": ranks.fallbacks,
        "halos": ranks.halos,
        "bytes_sent": ranks.bytes_sent,
        "correlation": scores,
    }
    (out / "cortex_graph.json").write_text(json.dumps(figures, indent=1), encoding="utf-8")
    (out / "cortex_licence.txt").write_text(licence_note(), encoding="utf-8")
    draw(out / "cortex_graph.png", left, right, task.target, serial, ranks)
    print(f"Kept in {out}: cortex_graph.png, cortex_graph.json, cortex_licence.txt")
    return holds


def main() -> int:
    """Run everything; 0 when the comparison holds."""
    arguments = parse()
    task = Task(arguments.target, arguments.dtype, arguments.coarser, arguments.steps)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if under_torchrun():
        ranks = join(task)
        if os.environ["RANK"] != "0":
            return 0
    else:
        ranks = spawn(task, arguments.ranks, arguments.out)
    return 0 if compare(task, run_serial(task), ranks, arguments.out) else 1


if __name__ == "__main__":
    sys.exit(main())
