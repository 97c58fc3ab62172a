#!/usr/bin/env python3
"""Kills ranks of a sharded training job, at every point of a step, and looks at what is left.

Each case starts a job of a few ranks (Gloo, loopback, the store outside of the ranks as under torchrun)
that trains a small net on pieces of one sample and saves a checkpoint after every step. In the second
step one rank is killed (SIGKILL), exits, or raises at the k-th of its events: before and after the
forward of each layer, at the gradient of each layer's output and each parameter, around the optimizer
and while it saves; or some microseconds later, in the middle of whatever then runs. Afterwards

- no other rank may be alive at the end of the time limit (a hang);
- each of them must have raised, and named op and rank;
- the checkpoint must load, and hold exactly the parameters of the step it names (else it is lost).

    python tools/fault_injection.py --ranks 2 3 --points 50 --faults kill
"""

from __future__ import annotations

import argparse
import collections
import datetime
import faulthandler
import json
import multiprocessing
import multiprocessing.connection
import os
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

STEPS = 4
FAULT_STEP = 1
TIMEOUT_S = 20.0
LIMIT_S = 60.0
START_S = 300.0
EVENTS = {2: 70, 3: 60}  # of a step of the job below, by ranks; every full run counts them anew
FAULTS = ("kill", "exit", "raise")
NAMED = re.compile(r"[a-z_0-9:]+(?: \(comparing calls\))? on rank \d+ of \d+")


class Net(nn.Module):
    """Layers with every kind of exchange: halo, statistics, sums of weight gradients, moves."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lift = nn.Conv1d(2, 4, 5, padding=2)
        self.norm = nn.GroupNorm(2, 4)
        self.down = nn.Conv1d(4, 6, 4, stride=2, padding=1)
        self.batch = nn.BatchNorm1d(6)
        self.mix = nn.Linear(6, 6)
        self.up = nn.ConvTranspose1d(6, 4, 4, stride=2, padding=1)
        self.last = nn.Conv1d(4, 2, 3, padding=1)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.norm(self.lift(x)))
        x = F.gelu(self.batch(self.down(x)))
        x = self.mix(x.transpose(1, 2)).transpose(1, 2)
        return self.last(F.silu(self.up(x)))


@dataclass(frozen=True)
class Case:
    """One job and what happens to it. `point` counts the victim's events in the second step."""

    ranks: int
    victim: int
    fault: str
    point: int
    delay_s: float = 0.0


@dataclass
class Outcome:
    """What was left of a job."""

    case: Case
    hung: list[int]
    silent: list[int]  # ended without naming op and rank
    messages: dict[int, str]
    checkpoint: str  # empty: loads and is right
    step: int
    seconds: float

    @property
    def is_good(self) -> bool:
        return not (self.hung or self.silent or self.checkpoint)


def sample() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(1, 2, 20, dtype=torch.float64, generator=generator),
        torch.randn(1, 2, 20, dtype=torch.float64, generator=generator),
    )


# --------------------------------------------------------------------------------------- rank side


class Events:
    """Counts what a rank passes through in the step of the fault; acts at one of them."""

    def __init__(self, act: Callable[[], None], point: int) -> None:
        self.count = 0
        self.active = False
        self._act, self._point = act, point

    def __call__(self, *_: Any) -> None:
        if not self.active:
            return
        self.count += 1
        if self.count - 1 == self._point:
            self._act()

    def watch(self, net: nn.Module) -> None:
        """Puts events into forward and backward."""

        def after(_module: nn.Module, _args: Any, out: torch.Tensor) -> None:
            self()
            if out.requires_grad:
                out.register_hook(self)

        for module in net.modules():
            module.register_forward_pre_hook(self)
            module.register_forward_hook(after)
        for p in net.parameters():
            p.register_post_accumulate_grad_hook(self)


def fault_of(case: Case) -> Callable[[], None]:
    def strike() -> None:
        if case.fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(3)

    def act() -> None:
        if case.fault == "raise":
            raise ValueError("the injected error")
        if case.delay_s == 0:
            strike()
        threading.Timer(case.delay_s, strike).start()

    return act


def train(events: Events, folder: str, cut: Callable[[torch.Tensor], torch.Tensor]) -> None:
    from shardfield.distributed import name_layers

    from shardfield.checkpoint import save_sharded

    net = Net()
    name_layers(net)
    events.watch(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x, t = (cut(part) for part in sample())
    for step in range(STEPS):
        events.active = step == FAULT_STEP
        loss = F.mse_loss(net(x), t)
        loss.backward()
        events()
        optimizer.step()
        events()
        optimizer.zero_grad()
        state = {"net": net, "optimizer": optimizer, "step": step}
        save_sharded(folder, state, rng=False, progress=events)
        events()


def run_rank(case: Case, rank: int, port: int, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    stack = open(Path(folder, f"rank{rank}.stack"), "w")  # noqa: SIM115
    faulthandler.register(signal.SIGUSR1, file=stack)
    limit = datetime.timedelta(seconds=TIMEOUT_S)
    store = dist.TCPStore("127.0.0.1", port, None, False, limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.ranks, timeout=limit)
    from shardfield.distributed import tell_failures
    from shardfield.domain_parallel import shard_tensor
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (case.ranks,))
    events = Events(fault_of(case), case.point if rank == case.victim else -1)
    told = "finished"
    try:
        with tell_failures():
            train(
                events, os.path.join(folder, "saved"), lambda x: shard_tensor(x, mesh, [Shard(2)])
            )
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    Path(folder, f"rank{rank}.json").write_text(json.dumps([told, events.count]))
    os._exit(0)  # as a job that ends: without waiting for a group that is broken


# ------------------------------------------------------------------------------------- parent side


def context() -> Any:
    """A fork server that has imported torch once."""
    here = str(Path(__file__).resolve().parent)
    paths = [here, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    made = multiprocessing.get_context("forkserver")
    made.set_forkserver_preload(["torch", "shardfield", "shardfield.checkpoint", "fault_injection"])
    return made


def reference() -> list[dict[str, torch.Tensor]]:
    """The parameters after each step on one device."""
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    x, t = sample()
    states = []
    for _ in range(STEPS):
        F.mse_loss(net(x), t).backward()
        optimizer.step()
        optimizer.zero_grad()
        states.append({k: v.clone() for k, v in net.state_dict().items()})
    return states


def check_checkpoint(folder: Path, want: list[dict[str, torch.Tensor]]) -> tuple[str, int]:
    """What is wrong with the checkpoint ("" when nothing), and its step."""
    from shardfield.checkpoint import load_sharded

    try:
        found = load_sharded(str(folder))
    except Exception as error:
        return f"does not load: {error}", -1
    step = found["step"]
    for name, value in want[step].items():
        if not torch.allclose(found["net"][name], value, rtol=1e-8, atol=1e-10):
            return f"step {step}: {name} is not that of the step", step
    return "", step


def stack_of(process: Any, file: Path) -> str:
    """Where a rank that does not end is; "not started" before it can tell."""
    if not file.exists():
        return "not started"
    os.kill(process.pid, signal.SIGUSR1)
    time.sleep(1)
    return file.read_text()


def run_case(case: Case, made: Any, want: list[dict[str, torch.Tensor]]) -> Outcome:
    """Runs one job to its end."""
    folder = Path(tempfile.mkdtemp(prefix="shardfield-fault-"))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    began = time.monotonic()
    import fault_injection

    processes = [
        made.Process(
            target=fault_injection.run_rank, args=(case, r, store.port, str(folder)), daemon=True
        )
        for r in range(case.ranks)
    ]
    for p in processes:
        p.start()
    processes[case.victim].join(START_S)  # its end is the fault: the others' time begins
    end = time.monotonic() + LIMIT_S
    for p in processes:
        p.join(max(0.0, end - time.monotonic()))
    hung = [r for r, p in enumerate(processes) if p.exitcode is None]
    seconds = time.monotonic() - began
    messages: dict[int, str] = {}
    for r in range(case.ranks):
        file = folder / f"rank{r}.json"
        messages[r] = json.loads(file.read_text())[0] if file.exists() else ""
    for r in hung:
        messages[r] = stack_of(processes[r], folder / f"rank{r}.stack")
        processes[r].kill()
    silent = [
        r
        for r, text in messages.items()
        if r != case.victim and r not in hung and not NAMED.search(text)
    ]
    if case.point < 0:
        silent = [r for r, text in messages.items() if text != "finished"]
    fault, step = check_checkpoint(folder / "saved", want)
    shutil.rmtree(folder, ignore_errors=True)
    return Outcome(case, hung, silent, messages, fault, step, seconds)


def count_events(ranks: int, made: Any, want: list[dict[str, torch.Tensor]]) -> int:
    """Events of a step without a fault."""
    folder = Path(tempfile.mkdtemp(prefix="shardfield-fault-"))
    store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    import fault_injection

    case = Case(ranks, -1, "kill", -1)
    args = [(case, r, store.port, str(folder)) for r in range(ranks)]
    processes = [made.Process(target=fault_injection.run_rank, args=a) for a in args]
    for p in processes:
        p.start()
    for p in processes:
        p.join(LIMIT_S)
    told, events = json.loads((folder / "rank0.json").read_text())
    fault, step = check_checkpoint(folder / "saved", want)
    shutil.rmtree(folder, ignore_errors=True)
    if told != "finished" or fault or step != STEPS - 1:
        raise RuntimeError(f"fault_injection: the job fails without a fault: {told} {fault}")
    return events


def cases(ranks: int, points: int, faults: list[str], events: int) -> Iterator[Case]:
    """`points` places, spread over the events, for each rank; every third strikes a little later."""
    for fault in faults:
        for victim in range(ranks):
            for i in range(points):
                delay = 0.0 if i % 3 or fault == "raise" else 0.0001 * (1 + i % 7)
                yield Case(ranks, victim, fault, i * events // points, delay)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 3])
    parser.add_argument("--points", type=int, default=50)
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=["kill"])
    options = parser.parse_args()
    made, want = context(), reference()
    total: collections.Counter[str] = collections.Counter()
    slowest = 0.0
    for ranks in options.ranks:
        events = count_events(ranks, made, want)
        for case in cases(ranks, options.points, options.faults, events):
            outcome = run_case(case, made, want)
            total["jobs"] += 1
            total["hangs"] += bool(outcome.hung)
            total["silent"] += bool(outcome.silent)
            total["lost checkpoints"] += bool(outcome.checkpoint)
            slowest = max(slowest, outcome.seconds)
            if not outcome.is_good:
                print(outcome, flush=True)
            if total["jobs"] % 25 == 0:
                print(f"{dict(total)}", flush=True)
        print(f"{ranks} ranks, {events} events a step: {dict(total)}, slowest job {slowest:.1f} s")
    return int(total["hangs"] + total["silent"] + total["lost checkpoints"] > 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    sys.exit(main())
