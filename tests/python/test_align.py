"""align_communicators under a real mpirun, with a communicator of mpi4py and with numbers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shardfield.distributed import align_communicators
from test_launchers import clean_environment, finish, free_port, program, start

SCRIPT = str(Path(__file__).resolve().parent / "aligned_rank.py")


def run_mpi(
    ranks: int,
    command: list[str],
    environment: dict[str, str],
    folder: Path,
    launcher: str = "mpirun.openmpi",
) -> None:
    mpirun = [program(launcher), "-np", str(ranks), *command]
    ((code, text),) = finish([start(mpirun, environment)])
    assert code == 0, text[-4000:]
    assert len(list(folder.glob("*.passed"))) == ranks, text[-4000:]


def test_K7_agreed_permuted_other_sizes_split_and_missing(tmp_path):
    run_mpi(4, [sys.executable, SCRIPT, str(tmp_path), "all"], clean_environment(), tmp_path)


def test_K7_torch_started_in_another_order_is_refused(tmp_path):
    """RANK reversed, and the override says to believe it: the alignment does not."""
    line = f"RANK=$((1 - OMPI_COMM_WORLD_RANK)) exec {sys.executable} {SCRIPT} {tmp_path} torch_permuted"
    environment = clean_environment(
        WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=free_port()
    )
    run_mpi(2, ["sh", "-c", line], environment, tmp_path)


def test_K7_under_mpich_three_ranks_agreed_permuted_other_sizes_and_missing(tmp_path):
    """mpi4py looks for MPICH under the name of its ABI; Debian's library has another one."""
    found = sorted(Path("/usr/lib").glob("*/libmpich.so.12"))
    assert found, "MPICH's library is missing: tools/install_system_packages.sh installs it"
    (tmp_path / "libmpi.so.12").symlink_to(found[0])
    environment = clean_environment(MPI4PY_MPIABI="mpich", LD_LIBRARY_PATH=str(tmp_path))
    command = [sys.executable, SCRIPT, str(tmp_path), "all"]
    run_mpi(3, command, environment, tmp_path, "mpirun.mpich")


def test_what_is_no_communicator_is_named(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(TypeError, match="pass the solver's rank and size"):
        align_communicators("MPI_COMM_WORLD")
    for no_numbers in (("0", "2"), (0.0, 2.0), (None, 2), (0, 1, 2)):
        with pytest.raises(TypeError, match="pass the solver's rank and size"):
            align_communicators(no_numbers)
    with pytest.raises(RuntimeError, match=r"expected a rank in \[0, 2\), got 2"):
        align_communicators((2, 2))
    with pytest.raises(RuntimeError, match="export MASTER_ADDR and MASTER_PORT"):
        align_communicators((0, 2))
