"""DistributedManager under real launchers: torchrun, Open MPI, MPICH, SLURM's variables, none."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
SCRIPT = str(HERE / "launched_rank.py")
LIMIT_S = 120
LAUNCHER_PREFIXES = ("SLURM_", "OMPI_", "PMI", "MPI_", "TORCHELASTIC_")
LAUNCHER_NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def clean_environment(**more: str) -> dict[str, str]:
    kept = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(LAUNCHER_PREFIXES) and k not in LAUNCHER_NAMES
    }
    # Debian's Open MPI refuses to start as root, and more ranks than cores, unless told.
    kept |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return kept | {"OMPI_MCA_rmaps_base_oversubscribe": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])


def program(name: str) -> str:
    found = shutil.which(name)
    assert found, f"{name} is missing: tools/install_system_packages.sh installs it"
    return found


def start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str]]:
    results = []
    try:
        for p in processes:
            text, _ = p.communicate(timeout=LIMIT_S)
            results.append((p.returncode, text))
    finally:
        for p in processes:
            p.kill()
    return results


def reports(folder: Path) -> list[dict]:
    found = [json.loads(p.read_text()) for p in folder.glob("*.json")]
    return sorted(found, key=lambda r: r["rank"])


def check_job(folder: Path, ranks: int, launcher: str) -> None:
    found = reports(folder)
    whole = [float(r) for r in range(ranks) for _ in range(r + 1)]
    assert [r["rank"] for r in found] == list(range(ranks))
    for r in found:
        assert r["world_size"] == ranks
        assert r["local_rank"] == r["rank"]
        assert r["launcher"] == launcher
        assert r["whole"] == whole


def run_job(command: list[str], environment: dict[str, str]) -> None:
    ((code, text),) = finish([start(command, environment)])
    assert code == 0, text[-3000:]


def test_torchrun(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    command += [f"--master-port={free_port()}", SCRIPT, str(tmp_path)]
    run_job(command, clean_environment())
    check_job(tmp_path, 2, "ENV")


def test_open_mpi(tmp_path):
    command = [program("mpirun.openmpi"), "-np", "2", sys.executable, SCRIPT, str(tmp_path)]
    run_job(command, clean_environment())
    check_job(tmp_path, 2, "OPENMPI")


def test_mpich(tmp_path):
    command = [program("mpirun.mpich"), "-np", "2", sys.executable, SCRIPT, str(tmp_path)]
    run_job(command, clean_environment(MASTER_PORT=free_port()))
    check_job(tmp_path, 2, "MPICH")


def test_slurm_variables(tmp_path):
    port = free_port()
    processes = [
        start(
            [sys.executable, SCRIPT, str(tmp_path)],
            clean_environment(
                SLURM_PROCID=str(rank),
                SLURM_NTASKS="2",
                SLURM_LOCALID=str(rank),
                SLURM_LAUNCH_NODE_IPADDR="127.0.0.1",
                MASTER_PORT=port,
            ),
        )
        for rank in range(2)
    ]
    assert [code for code, _ in finish(processes)] == [0, 0]
    check_job(tmp_path, 2, "SLURM")
    assert reports(tmp_path)[0]["listening"] == ["0100007F"], "other hosts can reach the store"


def test_K1_no_launcher_and_no_accelerator(tmp_path):
    run_job([sys.executable, SCRIPT, str(tmp_path)], clean_environment(CUDA_VISIBLE_DEVICES=""))
    check_job(tmp_path, 1, "SINGLE")
    assert reports(tmp_path)[0]["device"] == "cpu"


def test_K7_ranks_exported_against_mpirun_are_refused(tmp_path):
    """RANK is the reverse of MPI's rank: no rank starts, and the text names both."""
    reverse = (
        "RANK=$((1 - OMPI_COMM_WORLD_RANK)) WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=1 "
        f"exec {sys.executable} {SCRIPT} {tmp_path}"
    )
    command = [program("mpirun.openmpi"), "-np", "2", "sh", "-c", reverse]
    ((code, text),) = finish([start(command, clean_environment())])
    assert code != 0
    # mpirun ends the others once one has failed: it may be either's text.
    words = "ENV says rank {} of 2, OPENMPI says rank {} of 2"
    assert words.format(1, 0) in text or words.format(0, 1) in text
    assert "SHARDFIELD_DISTRIBUTED_INITIALIZATION_METHOD" in text
    assert reports(tmp_path) == []


def test_K1_the_users_exception_ends_the_process_and_is_what_is_shown(tmp_path):
    environment = clean_environment(CUDA_VISIBLE_DEVICES="", FAILING_RANK="0")
    ((code, text),) = finish([start([sys.executable, SCRIPT, str(tmp_path)], environment)])
    assert code == 1
    assert text.rstrip().endswith("ValueError: the user's own words"), text[-2000:]


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"RANK": "0"}, ["expected RANK and WORLD_SIZE", "RANK=0"]),
        ({"SLURM_PROCID": "0"}, ["SLURM_NTASKS or SLURM_NPROCS", "SLURM_PROCID=0"]),
    ],
)
def test_partial_variables_are_listed(variables, expected):
    from shardfield._core import core

    with pytest.raises(RuntimeError) as caught:
        core.read_launch_environment(variables, "")
    assert all(part in str(caught.value) for part in expected)
