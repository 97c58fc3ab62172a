"""Rank processes that check operators one after another and are started afresh after a fault."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

from shardfield.selftest._check import Outcome, Verdict

GROUP_TIMEOUT_S = 10.0
OPERATOR_LIMIT_S = 120.0
START_LIMIT_S = 180.0


def _serve(rank: int, shape: Sequence[int], port: int, commands: Connection) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    from shardfield.selftest._check import check_operator

    torch.set_num_threads(1)
    size = 1
    for n in shape:
        size *= n
    timeout = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    dist.init_process_group("gloo", rank=rank, world_size=size, timeout=timeout)
    mesh = init_device_mesh("cpu", tuple(shape))
    commands.send("ready")
    while (name := commands.recv()) is not None:
        commands.send(check_operator(mesh, name))
    dist.destroy_process_group()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Ranks:
    """A mesh of CPU rank processes on this machine.

    Args:
        shape: ranks per mesh axis.
    """

    def __init__(self, shape: Sequence[int]) -> None:
        self._shape = tuple(shape)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []

    def check(self, names: Iterable[str]) -> Iterator[tuple[str, list[Outcome]]]:
        """Yields each operator's outcomes; a hang or a crash is an outcome too."""
        try:
            for name in names:
                if not self._processes:
                    self._start()
                yield name, self._check_one(name)
        finally:
            self._stop()

    def _start(self) -> None:
        size = 1
        for n in self._shape:
            size *= n
        port = _free_port()
        context = multiprocessing.get_context("spawn")
        for rank in range(size):
            here, there = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self._shape, port, there), daemon=True
            )
            process.start()
            there.close()
            self._processes.append(process)
            self._pipes.append(here)
        if self._collect(START_LIMIT_S) is None:
            raise RuntimeError(f"selftest: the {size} ranks did not start in {START_LIMIT_S:.0f} s")

    def _collect(self, limit_s: float) -> list[Any] | None:
        end = time.monotonic() + limit_s
        answers = []
        for pipe in self._pipes:
            if not pipe.poll(max(0.0, end - time.monotonic())):
                return None
            try:
                answers.append(pipe.recv())
            except EOFError:
                return None
        return answers

    def _check_one(self, name: str) -> list[Outcome]:
        for pipe in self._pipes:
            pipe.send(name)
        answers = self._collect(OPERATOR_LIMIT_S)
        if answers is None:
            alive = all(p.is_alive() for p in self._processes)
            verdict = Verdict.HUNG if alive else Verdict.CRASHED
            codes = [p.exitcode for p in self._processes]
            self._stop()
            return [Outcome(name, -1, -1, "", verdict, f"exit codes {codes}")]
        if len({len(outcomes) for outcomes in answers}) > 1 or any(
            outcomes and outcomes[-1].verdict == Verdict.HUNG for outcomes in answers
        ):
            self._stop()  # with a group that is lost every later call would fail
        longest = max(answers, key=len)
        return [
            max((a[i] for a in answers if i < len(a)), key=lambda o: o.verdict)
            for i in range(len(longest))
        ]

    def _stop(self) -> None:
        for pipe in self._pipes:
            try:
                pipe.send(None)
            except OSError:  # the rank is gone already
                continue
        for process in self._processes:
            process.join(timeout=2)
            if process.is_alive():
                process.kill()
                process.join()
        self._processes, self._pipes = [], []
