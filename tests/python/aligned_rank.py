"""What one rank of `mpirun` does in test_align: aligns torch with MPI in many ways; no pytest."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy
import torch
import torch.distributed as dist
from mpi4py import MPI
from shardfield.distributed import DistributedManager, align_communicators, all_gather_v

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


def starts_torch() -> None:
    alignment = align_communicators(WORLD)
    dm = DistributedManager()
    assert (dm.rank, dm.world_size, dm.local_rank) == (RANK, SIZE, RANK)
    assert dm.launcher == "SOLVER"
    assert (alignment.rank, alignment.size) == (RANK, SIZE)
    assert alignment.group is dist.group.WORLD
    assert alignment.table.count("\n") == SIZE
    launcher = "OPENMPI" if "Open MPI" in MPI.Get_library_version() else "MPICH"
    assert f"solver {RANK}/{SIZE}, torch {RANK}/{SIZE}, launcher {launcher}" in alignment.table


def agreed() -> None:
    assert align_communicators(WORLD).rank == RANK
    assert align_communicators((RANK, SIZE)).rank == RANK
    assert align_communicators(RANK, SIZE, name="other").rank == RANK
    assert align_communicators(numpy.int64(RANK), numpy.int32(SIZE)).rank == RANK


def no_solvers_communicator() -> None:
    assert "MPI_COMM_NULL" in error_of(lambda: align_communicators(MPI.COMM_NULL))
    half = WORLD.Split(RANK % 2, RANK)
    between = half.Create_intercomm(0, WORLD, 1 - RANK % 2, 7)
    assert "inter-communicator" in error_of(lambda: align_communicators(between))


def permuted() -> None:
    turned = WORLD.Split(0, -RANK)
    text = error_of(lambda: align_communicators(turned))
    assert f"solver rank 0 is torch rank {SIZE - 1}" in text, text
    assert f"solver {SIZE - 1}/{SIZE}, torch 0/{SIZE}" in text, text
    assert WORLD.allgather(text) == [text] * SIZE
    text = error_of(lambda: align_communicators((SIZE - 1 - RANK, SIZE)))
    assert f"solver rank 0 is torch rank {SIZE - 1}" in text, text


def other_sizes() -> None:
    text = error_of(lambda: align_communicators((RANK, SIZE + 1)))
    assert f"expected a solver of {SIZE} ranks" in text, text
    text = error_of(lambda: align_communicators((0, SIZE)))
    assert "each once" in text, text
    text = error_of(lambda: align_communicators((SIZE, SIZE)))
    assert f"expected a rank in [0, {SIZE})" in text, text


def two_solvers() -> None:
    solver = WORLD.Split(RANK // 2, RANK)
    alignment = align_communicators(solver, name=f"solver {RANK // 2}")
    assert (alignment.rank, alignment.size) == (RANK % 2, 2)
    whole = all_gather_v(torch.tensor([RANK]), [1, 1], group=alignment.group)
    assert whole.tolist() == [RANK // 2 * 2, RANK // 2 * 2 + 1]
    turned = WORLD.Split(RANK // 2, -RANK)
    assert "in another order" in error_of(lambda: align_communicators(turned))
    # One solver on ranks 1 and 3; the others do not even know.
    odd = WORLD.Split(RANK % 2, RANK)
    if RANK % 2:
        alone = align_communicators(odd, name="odd")
        assert dist.get_process_group_ranks(alone.group) == [1, 3]
        assert align_communicators((RANK // 2, 2), group=alone.group, name="odd").rank == RANK // 2


class CrossedWires:
    """The world, but what goes to the right neighbour goes to the left one."""

    def __getattr__(self, name: str) -> object:
        return getattr(WORLD, name)

    def Isend(self, buffer: object, dest: int, tag: int) -> object:
        return WORLD.Isend(buffer, dest=(2 * RANK - dest) % SIZE, tag=tag)

    def Irecv(self, buffer: object, source: int, tag: int) -> object:
        return WORLD.Irecv(buffer, source=(2 * RANK - source) % SIZE, tag=tag)


def crossed_wires() -> None:
    """The numbers agree, the order does not: only the token finds that out."""
    text = error_of(lambda: align_communicators(CrossedWires()))
    assert f"rank {RANK} got a token that is not rank {(RANK - 1) % SIZE}'s" in text, text


def one_rank_is_missing() -> None:
    last = SIZE - 1
    if last != RANK:
        began = time.monotonic()
        text = error_of(lambda: align_communicators((RANK, SIZE), name="missing", timeout_s=1))
        assert f"torch ranks [{last}] have not called in time" in text, text
        assert f"torch {RANK}/{SIZE}" in text, text
        assert time.monotonic() - began < 10
    WORLD.Barrier()
    copy = WORLD.Dup()
    if last != RANK:
        text = error_of(lambda: align_communicators(copy, timeout_s=1))
        assert "has not called align_communicators" in text, text
    WORLD.Barrier()


def main(folder: str, case: str) -> None:
    torch.set_num_threads(1)
    if case == "torch_permuted":
        # torch was started first, by hand, with the ranks the other way round.
        DistributedManager.initialize_env()
        text = error_of(lambda: align_communicators(WORLD))
        assert f"solver rank 0 is torch rank {SIZE - 1}" in text, text
    else:
        parts = [starts_torch, agreed, permuted, other_sizes, crossed_wires, one_rank_is_missing]
        parts.append(no_solvers_communicator)
        if SIZE == 4:
            parts.append(two_solvers)
        for part in parts:
            part()
            WORLD.Barrier()
            if RANK == 0:
                print("passed", part.__name__, flush=True)
    Path(folder, f"{RANK}.passed").touch()
    DistributedManager.cleanup(barrier=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
