"""Pools of rank processes: started once per rank count, then running many cases.

A case is an importable module-level function. Every rank calls it with the same keyword
arguments, and what each rank returned or raised comes back to the test. Ranks are forked from one
server process that has already imported torch, so starting (or restarting) a pool takes a
fraction of a second.

A rank that dies, or stays silent while the others have answered, is reported within a bound
together with the tail of its log and the stack it hangs in, and the pool of that size is started
afresh for the next case.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import importlib
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

HERE = str(Path(__file__).resolve().parent)
GROUP_TIMEOUT_S = 30.0
CASE_LIMIT_S = 90.0
GRACE_S = 10.0  # how long the other ranks may stay silent once one of them has failed
START_LIMIT_S = 120.0
LOG_TAIL_CHARS = 3000
STOP = b"stop"


@dataclass
class Answer:
    """What one rank sent back: a value, or the text of the exception it raised."""

    rank: int
    ok: bool
    value: Any = None
    error: str = ""
    trace: str = ""


class RankFailure(AssertionError):
    """At least one rank raised, died or hung; the text holds every rank's story."""

    def __init__(self, text: str, answers: Sequence[Answer | None]):
        super().__init__(text)
        self.answers = list(answers)


# ---------------------------------------------------------------------------------------- rank side


_meshes: list[Any] = []


def _groups_of_cases() -> set[Any]:
    """The process groups on this rank but for the world's and those of the lasting meshes."""
    from torch.distributed.distributed_c10d import GroupMember, _world

    lasting: set[str] = set()
    for mesh in _meshes:
        for each in (mesh, *mesh._flatten_mapping.values()):
            lasting.update(each._dim_group_names)
    named = {group for group, name in _world.pg_names.items() if name not in lasting}
    return named - {GroupMember.WORLD}


@functools.cache
def mesh_of(shape: tuple[int, ...], names: tuple[str, ...] | None = None) -> Any:
    """The device mesh of this shape over all ranks of the pool, made once per process.

    DTensor and FSDP keep meshes in their caches and reuse them for equal ones, so cases with them
    take their meshes here: groups that a case makes itself are destroyed after it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    _meshes.append(init_device_mesh(device_type(), shape, mesh_dim_names=names))
    return _meshes[-1]


def device_type() -> str:
    """The device type of this pool: "cuda" when every rank has a device of its own."""
    return os.environ.get("SHARDFIELD_TEST_DEVICE", "cpu")


def call_on_mesh(shape: tuple[int, ...], function: Callable[..., Any], **kwargs: Any) -> Any:
    """A case that is handed the mesh of `shape` as its first argument."""
    return function(mesh_of(tuple(shape)), **kwargs)


def _choose_device(rank: int, world_size: int) -> str:
    """Picks the backend for what is there, and makes new tensors land on this rank's device."""
    import torch

    if torch.cuda.is_available() and torch.cuda.device_count() >= world_size:
        os.environ["SHARDFIELD_TEST_DEVICE"] = "cuda"
        torch.cuda.set_device(rank)
        torch.set_default_device(f"cuda:{rank}")
        return "nccl"
    os.environ["SHARDFIELD_TEST_DEVICE"] = "cpu"
    return "gloo"


def _rendezvous(connection: Connection, rank: int, world_size: int) -> Any:
    """A TCPStore on loopback; rank 0 takes a free port from the OS and the parent passes it on."""
    from torch.distributed import TCPStore

    limit = datetime.timedelta(seconds=GROUP_TIMEOUT_S)
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, world_size, True, limit, wait_for_workers=False)
        connection.send_bytes(pickle.dumps(store.port))
        return store
    port = pickle.loads(connection.recv_bytes())
    return TCPStore("127.0.0.1", port, world_size, False, limit, wait_for_workers=False)


def _run_case(rank: int, message: bytes) -> Answer:
    import torch
    import torch.distributed as dist

    try:
        module, name, kwargs = pickle.loads(message)
        function = functools.reduce(getattr, name.split("."), importlib.import_module(module))
        torch.manual_seed(0)
        before = _groups_of_cases()
        value = function(**kwargs)
        # An exchange that one rank did and another did not would otherwise spoil the next case.
        dist.all_reduce(torch.ones(1))
        # Each group has threads that wake up a hundred times a second.
        for group in _groups_of_cases() - before:
            dist.destroy_process_group(group)
        return Answer(rank, True, value=value)
    except BaseException as error:
        text = f"{type(error).__name__}: {error}"
        if not str(error):  # a bare assert: its source line says more than nothing
            frame = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            text = f"{type(error).__name__} at {place}: {frame.line}"
        return Answer(rank, False, error=text, trace=traceback.format_exc())


def _serve(connection: Connection, rank: int, world_size: int, log_path: str) -> None:
    """The body of a rank process: joins the group, then answers cases until told to stop."""
    log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    faulthandler.enable(file=sys.stderr)
    faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent stops its ranks itself
    if HERE not in sys.path:
        sys.path.insert(0, HERE)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    backend = _choose_device(rank, world_size)
    store = _rendezvous(connection, rank, world_size)
    dist.init_process_group(
        backend,
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(seconds=GROUP_TIMEOUT_S),
    )
    connection.send_bytes(pickle.dumps("ready"))
    while True:
        try:
            message = connection.recv_bytes()
        except EOFError:  # the parent is gone
            return
        if message == STOP:
            break
        answer = _run_case(rank, message)
        try:
            payload = pickle.dumps(answer)
        except Exception as error:
            payload = pickle.dumps(
                Answer(
                    rank,
                    False,
                    error=f"the result cannot be pickled: {error}",
                    trace=repr(answer.value),
                )
            )
        connection.send_bytes(payload)
    mesh_of.cache_clear()
    dist.destroy_process_group()


# -------------------------------------------------------------------------------------- parent side


@functools.cache
def _context(preload: tuple[str, ...]) -> Any:
    """One fork server for the whole run: it imports torch once, and each rank is forked from it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ["PYTHONPATH"] = os.pathsep.join(
        dict.fromkeys([HERE, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))])
    )
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.device_mesh", *preload])
    return context


class RankPool:
    """`world_size` rank processes in one Gloo (or NCCL) group, ready to run cases."""

    def __init__(self, world_size: int, preload: Sequence[str] = ()):
        self.world_size = world_size
        self.exit_codes: list[int | None] = []
        self._preload = tuple(preload)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self._logs: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="shardfield-ranks-")

    def run(
        self,
        function: Callable[..., Any],
        kwargs: dict[str, Any] | None = None,
        *,
        limit_s: float = CASE_LIMIT_S,
    ) -> list[Any]:
        """Calls `function(**kwargs)` on every rank and returns what each returned, by rank.

        Raises:
            RankFailure: a rank raised, died or did not answer within `limit_s`.
        """
        if not self._processes:
            self._start()
        message = pickle.dumps((function.__module__, function.__qualname__, kwargs or {}))
        began = time.monotonic()
        for connection in self._connections:
            connection.send_bytes(message)
        answers, trouble = self._collect(began + limit_s)
        if not trouble and all(answer is not None and answer.ok for answer in answers):
            return [answer.value for answer in answers if answer is not None]
        text = _story(function, answers, trouble, time.monotonic() - began)
        self._kill()
        raise RankFailure(text, answers)

    def close(self) -> list[int | None]:
        """Asks the ranks to leave, and returns their exit codes (empty if none were running)."""
        with contextlib.suppress(OSError):
            for connection in self._connections:
                connection.send_bytes(STOP)
        for process in self._processes:
            process.join(timeout=GRACE_S)
        self.exit_codes = [process.exitcode for process in self._processes]
        self._kill()
        shutil.rmtree(self._folder, ignore_errors=True)
        return self.exit_codes

    def _start(self) -> None:
        context = _context(self._preload)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            log = os.path.join(self._folder, f"rank{rank}.log")
            process = context.Process(
                target=_serve, args=(theirs, rank, self.world_size, log), daemon=True
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)
            self._logs.append(log)
        port = self._receive(0)
        for connection in self._connections[1:]:
            connection.send_bytes(pickle.dumps(port))
        for rank in range(self.world_size):
            self._receive(rank)

    def _receive(self, rank: int) -> Any:
        connection = self._connections[rank]
        try:
            if connection.poll(START_LIMIT_S):
                return pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            pass
        tail = self._tail(rank)
        self._kill()
        raise RankFailure(f"rank {rank} of {self.world_size} did not start:\n{tail}", [])

    def _collect(self, deadline: float) -> tuple[list[Answer | None], dict[int, str]]:
        """Waits for all answers; the second value tells which ranks died or hung, and how."""
        answers: list[Answer | None] = [None] * self.world_size
        trouble: dict[int, str] = {}
        waiting = dict(enumerate(self._connections))
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(
                list(waiting.values()), timeout=max(0.0, deadline - time.monotonic())
            )
            for rank in [r for r, connection in waiting.items() if connection in ready]:
                try:
                    answer = pickle.loads(waiting.pop(rank).recv_bytes())
                    answers[rank] = answer
                    failed = not answer.ok
                except (EOFError, OSError):
                    self._processes[rank].join(timeout=2)
                    code = self._processes[rank].exitcode
                    trouble[rank] = f"died with exit code {code}\n{self._tail(rank)}"
                    failed = True
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        for rank in waiting:
            trouble[rank] = "did not answer; its stack:\n" + self._stack_of(rank)
        return answers, trouble

    def _stack_of(self, rank: int) -> str:
        with contextlib.suppress(OSError, TypeError):
            os.kill(self._processes[rank].pid, signal.SIGUSR1)
            time.sleep(0.5)
        return self._tail(rank)

    def _tail(self, rank: int) -> str:
        with contextlib.suppress(OSError):
            return Path(self._logs[rank]).read_text(errors="replace")[-LOG_TAIL_CHARS:]
        return ""

    def _kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(timeout=GRACE_S)
        for connection in self._connections:
            connection.close()
        self._processes, self._connections, self._logs = [], [], []


def _story(
    function: Callable[..., Any],
    answers: Sequence[Answer | None],
    trouble: dict[int, str],
    seconds: float,
) -> str:
    """One text for all ranks; equal traces are told once."""
    lines: list[str] = []
    traces: dict[str, list[int]] = {}
    for answer in answers:
        if answer is not None and not answer.ok:
            lines.append(f"rank {answer.rank}: {answer.error}")
            traces.setdefault(answer.trace, []).append(answer.rank)
    lines += [f"rank {rank} {what.splitlines()[0]}" for rank, what in trouble.items()]
    lines.append(f"({function.__module__}.{function.__qualname__}, {seconds:.1f} s)")
    lines += [f"--- ranks {ranks}\n{trace}" for trace, ranks in traces.items()]
    lines += [f"--- rank {rank} {what}" for rank, what in trouble.items()]
    return "\n".join(lines)


@contextlib.contextmanager
def pools(preload: Sequence[str] = ()) -> Iterator[Callable[[int], RankPool]]:
    """Yields `pool_of(world_size)`; pools start on first use and all leave at the end.

    Raises:
        AssertionError: at the end, if a rank left with an exit code other than 0.
    """
    made: dict[int, RankPool] = {}

    def pool_of(world_size: int) -> RankPool:
        if world_size not in made:
            made[world_size] = RankPool(world_size, preload)
        return made[world_size]

    try:
        yield pool_of
    finally:
        codes = {size: pool.close() for size, pool in made.items()}
    bad = {size: code for size, code in codes.items() if any(code)}
    if bad:
        raise AssertionError(f"ranks left with exit codes other than 0: {bad}")
