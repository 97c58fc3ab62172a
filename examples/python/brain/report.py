"""The demo's report: tables on the terminal, the same as text and JSON in the output folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .compare import COMPARED_STEPS, LayerTraffic, RunResult, Runs
from .data import CLASSES, Brain


@dataclass
class Header:
    """What was run."""

    dtype: str
    millimetres: int
    dice: dict[str, list[float]]


def dice_scores(prediction: np.ndarray, labels: np.ndarray) -> list[float]:
    """Dice coefficient per class of two label volumes."""
    scores = []
    for index in range(len(CLASSES)):
        ours, theirs = prediction == index, labels == index
        scores.append(float(2 * (ours & theirs).sum() / max(1, ours.sum() + theirs.sum())))
    return scores


def _mib(count: float) -> str:
    return f"{count / 2**20:,.2f}"


def _kib(count: float) -> str:
    kib = count / 2**10
    return f"{kib:,.0f}" if kib >= 100 else f"{kib:.1f}"


def _table(title: str) -> Table:
    table = Table(title=f"\n{title}", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.title_justify = table.caption_justify = "left"
    return table


def _verdict(worst: float, bound: float) -> Text:
    if worst <= bound:
        return Text(f"{worst:.1e} <= {bound:.0e}", "bold green")
    return Text(f"{worst:.1e} EXCEEDS {bound:.0e}", "bold red")


def _ratio(sent: float, least: float) -> str:
    if least == 0:
        return "-" if sent == 0 else "> 0"
    return f"{sent / least:.2f}"


def _bytes(layers: Sequence[LayerTraffic]) -> list[str]:
    """Sent, least and ratio, forward and backward."""
    sent, least = sum(x.sent for x in layers), sum(x.least for x in layers)
    back, least_back = sum(x.sent_backward for x in layers), sum(x.least_backward for x in layers)
    forward = [_kib(sent), _kib(least), _ratio(sent, least)]
    return [*forward, _kib(back), _kib(least_back), _ratio(back, least_back)]


class Report:
    """Renders one run of the demo."""

    def __init__(self, brain: Brain, header: Header, runs: Runs) -> None:
        self.brain, self.header, self.runs = brain, header, runs

    def render(self) -> Group:
        """All tables in order."""
        title = "Loss per step and relative difference from serial"
        parts = [self._title(), self._losses(self.runs.sharded, title)]
        if self.runs.cpp:
            title = (
                "The same training in C++, ranks as threads; difference from Python's serial run"
            )
            parts.append(self._losses(self.runs.cpp, title))
        parts += [self._memory(), self._times()]
        parts += [self._traffic(run) for run in self.runs.sharded]
        parts += [self._summary(), self._fallbacks()]
        return Group(*parts)

    def show(self) -> None:
        """Print to the terminal."""
        Console().print(self.render())

    def write(self, out: Path) -> None:
        """Write ``brain_unet.txt`` and ``brain_unet.json``."""
        with (out / "brain_unet.txt").open("w", encoding="utf-8") as file:
            Console(file=file, width=110).print(self.render())
            for run in self.runs.sharded:
                file.write(
                    f"\n{run.title}: operations of the whole training on rank 0\n{run.table}\n"
                )
        (out / "brain_unet.json").write_text(json.dumps(self.as_dict(), indent=1), encoding="utf-8")

    def as_dict(self) -> dict:
        """Return the figures as plain values."""
        runs = [self.runs.serial, *self.runs.sharded, *self.runs.cpp]
        return {
            **asdict(self.header),
            "volume": list(self.brain.labels.shape[1:]),
            "classes": list(CLASSES),
            "holds": self.runs.hold,
            "compared_steps": COMPARED_STEPS,
            "runs": [{**asdict(run), "worst": run.worst, "holds": run.holds} for run in runs],
        }

    def _title(self) -> Panel:
        sizes = " x ".join(str(n) for n in self.brain.labels.shape[1:])
        text = (
            f"MNI152 T1 template, {sizes} voxels of {self.header.millimetres} mm; "
            f"3-D U-Net, three classes, {self.header.dtype}, "
            f"{len(self.runs.serial.losses)} steps of Adam"
        )
        return Panel(text, title="One brain on several ranks", title_align="left")

    def _losses(self, compared: Sequence[RunResult], title: str) -> Table:
        table = _table(title)
        table.add_column("step", justify="right")
        table.add_column("serial", justify="right")
        for run in compared:
            table.add_column(run.title, justify="right")
        shown = min(len(run.losses) for run in [self.runs.serial, *compared])
        for step, loss in enumerate(self.runs.serial.losses[:shown]):
            row = [f"{run.losses[step]:.7f}  {run.relative[step]:.0e}" for run in compared]
            table.add_row(
                str(step + 1), f"{loss:.7f}", *row, end_section=step == COMPARED_STEPS - 1
            )
        table.add_section()
        worst = [_verdict(run.worst, run.bound) for run in compared]
        table.add_row("", f"worst of {COMPARED_STEPS}", *worst)
        return table

    def _memory(self) -> Table:
        table = _table("Peak memory of forward, loss and backward on the fullest rank, MiB")
        table.add_column("run")
        for name in ("peak", "serial/N + halo", "halo", "ratio", "state"):
            table.add_column(name, justify="right")
        table.caption = "state: weights, gradients and optimizer, whole on every rank"
        serial = self.runs.serial
        table.add_row(
            "serial", _mib(serial.activation_bytes[0]), "", "", "", _mib(serial.state_bytes)
        )
        for run in self.runs.sharded:
            peak = max(run.activation_bytes)
            row = [_mib(peak), _mib(run.limit_bytes), _mib(run.halo_bytes)]
            table.add_row(run.title, *row, f"{peak / run.limit_bytes:.2f}", _mib(run.state_bytes))
        return table

    def _times(self) -> Table:
        table = _table("Median time of a step")
        table.add_column("run")
        table.add_column("seconds", justify="right")
        for run in [self.runs.serial, *self.runs.sharded, *self.runs.cpp]:
            table.add_row(run.title, f"{run.step_seconds:.3f}")
        return table

    def _traffic(self, run: RunResult) -> Table:
        table = _table(f"{run.title}: KiB all ranks send in one step, beside the least possible")
        for name in ("layer", "what"):
            table.add_column(name, no_wrap=True)
        for name in ("forward", "least", "ratio", "backward", "least", "ratio"):
            table.add_column(name, justify="right")
        for layer in run.layers:
            if layer.what != "norm":
                table.add_row(layer.name, layer.what, *_bytes([layer]))
        norms = [layer for layer in run.layers if layer.what == "norm"]
        table.add_row("all norms", "sums", *_bytes(norms))
        table.add_section()
        table.add_row("all layers", "", *_bytes(run.layers))
        inside = sum(layer.sent + layer.sent_backward for layer in run.layers)
        table.add_row("loss", "both ways", _kib(run.bytes_per_step - inside))
        table.caption = "backward includes the sums of the weights' gradients over the ranks"
        return table

    def _summary(self) -> Table:
        table = _table("Summary, with the Dice score of each class after training")
        for name in ("run", "losses", "fallbacks"):
            table.add_column(name, no_wrap=True)
        for name in CLASSES:
            table.add_column(name, justify="right")
        table.add_row("serial", "", "", *self._dice("serial"))
        for run in [*self.runs.sharded, *self.runs.cpp]:
            count = sum(run.fallbacks.values())
            cell = Text(f"{count} calls", "bold red") if count else Text("none", "green")
            verdict = _verdict(run.worst, run.bound)
            table.add_row(run.title, verdict, cell, *self._dice(run.title))
        return table

    def _dice(self, title: str) -> list[str]:
        return [f"{score:.4f}" for score in self.header.dice.get(title, [])]

    def _fallbacks(self) -> Text:
        """The operations that gathered, most frequent first; empty when there were none."""
        text = Text(style="bold red")
        for run in [*self.runs.sharded, *self.runs.cpp]:
            counts = sorted(run.fallbacks.items(), key=lambda item: -item[1])
            for op, count in counts:
                text.append(f"{run.title}: {op} gathered {count} times\n")
        return text
