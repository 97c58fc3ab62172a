"""Starts the ranks of a run and shows how far it is."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .ranks import Outcome, Plan, run_serial, run_sharded, spawned


def torchrun_plan() -> tuple[str, tuple[int, ...], tuple[int, ...]] | None:
    """Title, mesh and cut dimensions for the ranks torchrun started, None without torchrun."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    ranks = int(os.environ["WORLD_SIZE"])
    if ranks >= 4 and ranks % 2 == 0:
        return f"{ranks} ranks, 2 x {ranks // 2}", (2, ranks // 2), (2, 3)
    return f"{ranks} ranks, one axis", (ranks,), (2,)


class _Bar:
    """A progress bar fed with (step, loss); also usable as a message sink."""

    def __init__(self, plan: Plan, visible: bool) -> None:
        columns = (
            TextColumn("{task.description:<20}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
        )
        console = Console(stderr=True, quiet=not visible)
        self.progress = Progress(*columns, console=console)
        self.task = self.progress.add_task(plan.title, total=plan.steps, note="starting")

    def put(self, item: Any) -> None:
        """Advance to a step."""
        step, loss = item
        self.progress.update(self.task, completed=step + 1, note=f"loss {loss:.4f}")

    def __enter__(self) -> _Bar:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()


class Launcher:
    """Runs plans one after the other.

    Attributes:
      leads: true on the one process that reads data and reports.
    """

    def __init__(self) -> None:
        self.torchrun = torchrun_plan() is not None
        self.leads = not self.torchrun or os.environ["RANK"] == "0"

    def run(self, plan: Plan) -> list[Outcome]:
        """Run a plan to its end.

        Returns:
          What each rank handed back, in the order of the ranks; empty where this process does not
          lead.
        """
        with _Bar(plan, self.leads) as bar:
            return self._join(plan, bar) if self.torchrun else _spawn(plan, bar)

    def _join(self, plan: Plan, bar: _Bar) -> list[Outcome]:
        """Run as one of torchrun's ranks."""
        if not plan.mesh:
            return [run_serial(plan, bar)] if self.leads else []
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", timeout=timedelta(hours=2))
        outcome = run_sharded(plan, bar)
        outcomes: list[Any] | None = [None] * plan.ranks if self.leads else None
        dist.gather_object(outcome, outcomes)
        dist.destroy_process_group()
        return outcomes or []


def _spawn(plan: Plan, bar: _Bar) -> list[Outcome]:
    """Start the plan's processes and wait for them; a failing rank's traceback is raised here."""
    context = mp.get_context("spawn")
    results, steps = context.Queue(), context.Queue()
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    arguments = (plan, store.port, results, steps)
    processes = mp.start_processes(spawned, arguments, plan.ranks, join=False, start_method="spawn")
    outcomes: list[Outcome] = []
    finished = False
    while not finished or len(outcomes) < plan.ranks:
        finished = finished or processes.join(timeout=0.05)
        _drain(steps, bar.put)
        _drain(results, outcomes.append)
    return sorted(outcomes, key=lambda outcome: outcome.rank)


def _drain(source: Any, sink: Callable[[Any], None]) -> None:
    while True:
        try:
            sink(source.get_nowait())
        except queue.Empty:
            return
