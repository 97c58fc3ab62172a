"""The main demo as a user runs it: a short training, its exit status and the figures it keeps."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "python" / "brain_unet.py"


def run_demo(out: Path, *arguments: str, launcher: tuple[str, ...] = (sys.executable,)) -> str:
    """Run the demo's script and return what it printed; its status must be 0."""
    command = [*launcher, str(SCRIPT), "--millimetres", "9", "--steps", "3", "--out", str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, str]:
    """Folder, figures and text of one short run in float64."""
    out = tmp_path_factory.mktemp("demo")
    printed = run_demo(out, "--dtype", "float64")
    figures = json.loads((out / "brain_unet.json").read_text(encoding="utf-8"))
    return out, figures, printed


def test_losses_equal_the_serial_run(demo: tuple[Path, dict, str]) -> None:
    """Four ranks, 2 x 2, and three on one axis follow the serial losses in float64."""
    _, figures, _ = demo
    serial, *sharded = figures["runs"]
    assert figures["volume"] == [22, 26, 21]
    assert figures["holds"]
    assert [run["mesh"] for run in sharded] == [[2, 2], [3]]
    for run in sharded:
        assert len(run["losses"]) == 3
        for loss, reference in zip(run["losses"], serial["losses"], strict=True):
            assert abs(loss - reference) <= 1e-9 * abs(reference)
    assert serial["losses"][-1] < serial["losses"][0]


def test_nothing_falls_back_and_halos_are_least(demo: tuple[Path, dict, str]) -> None:
    """No operation gathers, and every convolution sends exactly the rows it has to."""
    _, figures, _ = demo
    for run in figures["runs"][1:]:
        assert run["fallbacks"] == {}
        assert 0 < sum(layer["sent"] for layer in run["layers"]) < run["bytes_per_step"]
        for layer in run["layers"]:
            if layer["what"].startswith("conv"):
                assert layer["sent"] == layer["least"], layer


def test_a_rank_holds_its_share_of_the_activations(demo: tuple[Path, dict, str]) -> None:
    """Peak memory falls with the number of ranks; state is whole on every rank."""
    _, figures, _ = demo
    serial, *sharded = figures["runs"]
    for run in sharded:
        assert max(run["activation_bytes"]) < 0.6 * serial["activation_bytes"][0]
        assert run["state_bytes"] == serial["state_bytes"]


def test_keeps_picture_text_and_licence(demo: tuple[Path, dict, str]) -> None:
    """Everything that is printed is kept, with the note on the data's origin."""
    out, _, printed = demo
    assert (out / "brain_unet.png").read_bytes().startswith(b"\x89PNG")
    assert "Loss per step" in printed
    assert "Loss per step" in (out / "brain_unet.txt").read_text(encoding="utf-8")
    assert "ICBM" in (out / "brain_volume_licence.txt").read_text(encoding="utf-8")


def test_runs_under_torchrun(tmp_path: Path) -> None:
    """Started by torchrun, the script takes the ranks it is given."""
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    run_demo(tmp_path, launcher=launcher)
    figures = json.loads((tmp_path / "brain_unet.json").read_text(encoding="utf-8"))
    assert figures["holds"]
    assert [run["mesh"] for run in figures["runs"]] == [[], [2]]


def test_large_volumes_start_with_small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 4 mm all steps are alike; of 1 mm the tenth is a 64th of the last."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    rates = importlib.import_module("brain.train").learning_rates
    assert rates(12, 50 * 59 * 48) == [0.05] * 12
    fine = rates(20, 197 * 233 * 189)
    assert fine == [0.05 * 2.0 ** min(0, step - 15) for step in range(20)]
    assert fine[9] == 0.05 / 64


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "rows"),
    [
        (3, 1, 1, 1, 2),
        (3, 2, 1, 1, 1),
        (4, 2, 1, 1, 2),
        (7, 2, 3, 1, 5),
        (3, 1, 2, 2, 4),
        (2, 2, 0, 1, 0),
        (1, 1, 0, 1, 0),
    ],
)
def test_least_halo_is_kernel_minus_stride(
    kernel: int,
    stride: int,
    padding: int,
    dilation: int,
    rows: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit the demo prints: (k_e - s)+ rows times the cross-section at every border."""
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    limits = importlib.import_module("brain.limits")
    sizes = (26, 9, 7)
    out = [(n + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for n in sizes]
    reads = [limits.conv_reads(kernel, stride, padding, dilation, n) for n in sizes]
    halo = limits.halo([[0, 10, 18, 26], [0, 9], [0, 7]], reads, out)
    assert halo.forward <= 2 * rows * 9 * 7
    read = [
        min(n, (m - 1) * stride - padding + dilation * (kernel - 1) + 1)
        for n, m in zip(sizes[1:], out[1:], strict=True)
    ]
    assert halo.forward == 2 * rows * read[0] * read[1]
