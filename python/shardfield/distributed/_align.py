"""align_communicators: torch's ranks are the solver's ranks, or nobody goes on."""

from __future__ import annotations

import os
import random
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from operator import index
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from shardfield._core import core
from shardfield.distributed._collectives import all_to_all_v
from shardfield.distributed._groups import Group, default_device, process_group
from shardfield.distributed._manager import DistributedManager

_OP = "align_communicators"
_CARD_BYTES = 512
_POLL_S = 0.002
_calls: dict[str, int] = {}


@dataclass
class Alignment:
    """What the ranks agreed on.

    Args:
        group: torch's group of the solver's ranks, in the solver's order.
        rank: this rank in the solver and in the group.
        size: ranks of the solver and of the group.
        table: one line per rank: solver, torch, launcher, host, pid, device.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    table: str


def align_communicators(
    comm: Any,
    size: int | None = None,
    *,
    group: Group = None,
    name: str = "solver",
    addr: str | None = None,
    port: int | str | None = None,
    timeout_s: float = 60.0,
) -> Alignment:
    """Makes torch's ranks equal a solver's, or raises on every rank before any data moves.

    Without a process group, torch is started with the solver's rank and size. With one, ranks,
    sizes, order and devices are compared, and a token goes round both ways, through MPI (if given)
    and through torch. Collective over the solver's ranks, and only over them.

    Args:
        comm: the solver's communicator (mpi4py), its (rank, size), or its rank.
        size: the solver's size, where `comm` is its rank.
        group: with (rank, size): torch's group of the solver's ranks; all ranks when None.
        name: tells solvers apart that share torch's ranks; equal on the ranks of one solver.
        addr: host of solver rank 0 for starting torch; else MPI tells it, or MASTER_ADDR.
        port: port there; else MPI tells a free one, or MASTER_PORT.
        timeout_s: how long to wait for a rank that does not call.

    Returns:
        The group whose rank and size are the solver's.

    Raises:
        RuntimeError: on every rank, with the table of ranks: other sizes, ranks that differ, two
            ranks on one accelerator; or after the timeout, a rank that did not call.
        TypeError: `comm` is neither.

    Example:
        >>> from mpi4py import MPI
        >>> alignment = align_communicators(MPI.COMM_WORLD)
        >>> mesh = DeviceMesh.from_group(alignment.group, "cpu")
    """
    mpi = _is_mpi(comm)
    rank, size = (comm.Get_rank(), comm.Get_size()) if mpi else _pair(comm, size)
    if not 0 <= rank < size:
        raise RuntimeError(f"{_OP}: expected a rank in [0, {size}), got {rank}")
    deadline = time.monotonic() + timeout_s
    if not dist.is_initialized():
        _start_torch(comm if mpi else None, rank, size, addr, port, deadline)
    elif not DistributedManager.is_initialized():
        DistributedManager.initialize()
    mine = _own_card(rank, size)
    if mpi:
        cards = _cards_through_mpi(comm, mine, deadline)
    else:
        cards = _cards_through_store(mine, process_group(group, _OP), name, deadline)
    fault = core.alignment_fault(cards)
    table = core.alignment_table(cards)
    if fault:
        raise RuntimeError(f"{_OP}: {fault}. The ranks:{table}")
    cards.sort(key=lambda card: card.solver_rank)
    found = _group_of([card.torch_rank for card in cards], group)
    if (found.rank(), found.size()) != (rank, size):
        raise RuntimeError(
            f"{_OP}: the group has rank {found.rank()} of {found.size()}, the solver rank {rank} of "
            f"{size}. The ranks:{table}"
        )
    tokens = [card.token for card in cards]
    if mpi:
        _check_ring(lambda step: _pass_through_mpi(comm, mine.token, step, deadline), tokens, rank)
    _check_ring(lambda step: _pass_through_torch(found, mine.token, step), tokens, rank)
    return Alignment(found, rank, size, table)


def _is_mpi(comm: Any) -> bool:
    """True for a communicator of one group of ranks; a null or an inter-communicator is refused."""
    if not all(hasattr(comm, name) for name in ("Get_rank", "Get_size", "Iallgather", "Isend")):
        return False
    if not comm:
        raise RuntimeError(
            f"{_OP}: expected the solver's communicator, got MPI_COMM_NULL; call it on the solver's "
            "ranks only"
        )
    if comm.Is_inter():
        raise RuntimeError(
            f"{_OP}: expected one group of ranks, got an inter-communicator; pass comm.Merge(), or "
            "each side's own"
        )
    return True


def _pair(comm: Any, size: Any) -> tuple[int, int]:
    pair = (comm, size) if size is not None else comm
    if isinstance(pair, (tuple, list)) and len(pair) == 2:
        with suppress(TypeError):
            return index(pair[0]), index(pair[1])
    raise TypeError(
        f"{_OP}: expected an MPI communicator of mpi4py or (rank, size), got {type(comm).__name__}; "
        "without mpi4py (pip install mpi4py) pass the solver's rank and size"
    )


def _own_card(rank: int, size: int) -> Any:
    dm = DistributedManager()
    card = core.RankCard()
    card.solver_rank, card.solver_size = rank, size
    card.torch_rank, card.torch_size = dm.rank, dm.world_size
    card.host, card.pid = socket.gethostname(), os.getpid()
    card.device = str(dm.device)
    if dm.cuda:
        card.gpu = str(getattr(torch.cuda.get_device_properties(dm.device), "uuid", ""))
    card.launcher = _launcher()
    card.token = random.SystemRandom().getrandbits(62)
    return card


def _launcher() -> str:
    """What the launcher's variables say, for the table."""
    try:
        name, rank, size, *_ = core.read_launch_environment(core.launch_variables(), "")
    except RuntimeError:
        return "contradictory variables"
    return "none" if name == "SINGLE" else f"{name} {rank}/{size}"


# ------------------------------------------------------------------------------- starting torch


def _start_torch(
    comm: Any, rank: int, size: int, addr: str | None, port: int | str | None, deadline: float
) -> None:
    local_rank = rank
    if comm is not None:
        # Held open until all ranks know it, so that nobody else is given the port meanwhile.
        with socket.socket() as held:
            held.bind(("", 0))
            texts = _all_gather_text(
                comm, f"{socket.gethostname()}\t{held.getsockname()[1]}", deadline
            )
        hosts = [text.split("\t")[0] for text in texts]
        addr = addr or ("127.0.0.1" if len(set(hosts)) == 1 else hosts[0])
        port = port or texts[0].split("\t")[1]
        local_rank = hosts[:rank].count(hosts[rank])
    else:
        addr = addr or os.environ.get("MASTER_ADDR")
        port = port or os.environ.get("MASTER_PORT")
        if size > 1 and (not addr or not port):
            raise RuntimeError(
                f"{_OP}: torch is not started and nobody says where rank 0 is; pass addr and port, "
                "export MASTER_ADDR and MASTER_PORT, or pass the MPI communicator"
            )
    DistributedManager.setup(
        rank,
        size,
        local_rank,
        addr or "localhost",
        port or 0,
        method="SOLVER",
        timeout=timedelta(seconds=max(deadline - time.monotonic(), 1.0)),
    )


# ------------------------------------------------------------------------------- telling each other


def _await(request: Any, deadline: float, what: str) -> None:
    """MPI waits without end; this does not."""
    while not request.Test():
        if time.monotonic() > deadline:
            raise RuntimeError(
                f"{_OP}: MPI's {what} did not end in time; a rank of the solver has not called "
                "align_communicators, or is gone"
            )
        time.sleep(_POLL_S)


def _all_gather_text(comm: Any, text: str, deadline: float) -> list[str]:
    """Every solver rank's text, through MPI. Collective over the communicator."""
    data = text.encode()
    mine: Any = np.zeros(_CARD_BYTES, dtype=np.uint8)
    mine[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    every: Any = np.zeros((comm.Get_size(), _CARD_BYTES), dtype=np.uint8)
    _await(comm.Iallgather(mine, every), deadline, "gather")
    return [row.tobytes().rstrip(b"\0").decode() for row in every]


def _cards_through_mpi(comm: Any, mine: Any, deadline: float) -> list[Any]:
    return [core.card_from_text(t) for t in _all_gather_text(comm, mine.to_text(), deadline)]


def _cards_through_store(
    mine: Any, group: dist.ProcessGroup, name: str, deadline: float
) -> list[Any]:
    """The cards of a group's ranks, through torch's store: a rank that is missing can be named."""
    store = dist.distributed_c10d._get_default_store()
    members = dist.get_process_group_ranks(group)
    series = f"shardfield/{_OP}/{name}/{'-'.join(map(str, members))}"
    call = _calls[series] = _calls.get(series, 0) + 1
    keys = {member: f"{series}/{call}/{member}" for member in members}
    store.set(keys[mine.torch_rank], mine.to_text())
    while missing := [m for m in members if not store.check([keys[m]])]:
        if time.monotonic() > deadline:
            here = [
                core.card_from_text(store.get(k).decode())
                for m, k in keys.items()
                if m not in missing
            ]
            raise RuntimeError(
                f"{_OP}: torch ranks {missing} have not called in time. The others:"
                f"{core.alignment_table(here)}"
            )
        time.sleep(_POLL_S)
    return [core.card_from_text(store.get(key).decode()) for key in keys.values()]


def _group_of(ranks: list[int], group: Group) -> dist.ProcessGroup:
    """The group of these ranks: all, the given one, or a new one that only they make."""
    if ranks == list(range(dist.get_world_size())):
        return process_group(None, _OP)
    if group is not None:
        return process_group(group, _OP)
    return dist.new_group(ranks, use_local_synchronization=True)


# ----------------------------------------------------------------------------------------- the ring


def _check_ring(send: Callable[[int], int], tokens: list[int], rank: int) -> None:
    """A token to the neighbour on each side: what arrives must be the neighbour's."""
    size = len(tokens)
    for step in (1, size - 1) if size > 1 else ():
        neighbour = (rank - step) % size
        if send(step) != tokens[neighbour]:
            raise RuntimeError(
                f"{_OP}: rank {rank} got a token that is not rank {neighbour}'s; the "
                "communicators are in another order than they say"
            )


def _pass_through_mpi(comm: Any, token: int, step: int, deadline: float) -> int:
    rank, size = comm.Get_rank(), comm.Get_size()
    got: Any = np.zeros(1, dtype=np.int64)
    receive = comm.Irecv(got, source=(rank - step) % size, tag=step)
    sent = comm.Isend(np.array([token], dtype=np.int64), dest=(rank + step) % size, tag=step)
    _await(receive, deadline, "message")
    _await(sent, deadline, "message")
    return int(got[0])


def _pass_through_torch(group: dist.ProcessGroup, token: int, step: int) -> int:
    size = group.size()
    sizes = [[int((i + step) % size == j) for j in range(size)] for i in range(size)]
    mine = torch.tensor([token], dtype=torch.int64, device=default_device(group, _OP))
    return int(all_to_all_v(mine, sizes, group=group))
