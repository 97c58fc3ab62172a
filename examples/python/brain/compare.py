"""Puts the sharded runs beside the serial one and beside what is least possible."""

from __future__ import annotations

import json
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .limits import Halo, conv_reads, halo, linear_reads
from .ranks import Outcome, Plan

COMPARED_STEPS = 10


@dataclass
class LayerTraffic:
    """Bytes of one layer in one step, summed over all ranks, beside the least possible."""

    name: str
    what: str
    sizes: str
    sent: int
    least: int
    sent_backward: int
    least_backward: int


@dataclass
class RunResult:
    """One run in figures. Bytes of memory are per rank, bytes of traffic summed over the ranks."""

    title: str
    mesh: tuple[int, ...]
    dims: tuple[int, ...]
    losses: list[float]
    relative: list[float]
    bound: float
    step_seconds: float
    activation_bytes: list[int]
    state_bytes: int
    halo_bytes: int = 0
    limit_bytes: int = 0
    fallbacks: dict[str, int] = field(default_factory=dict)
    bytes_per_step: int = 0
    layers: list[LayerTraffic] = field(default_factory=list)
    table: str = ""

    @property
    def worst(self) -> float:
        """Largest relative difference over the compared steps."""
        return max(self.relative[:COMPARED_STEPS], default=0.0)

    @property
    def holds(self) -> bool:
        """Whether the losses agree and nothing fell back to a gather."""
        return self.worst <= self.bound and not self.fallbacks


@dataclass
class Runs:
    """The serial run, the sharded ones, and the C++ twin's where it was run."""

    serial: RunResult
    sharded: list[RunResult]
    cpp: list[RunResult] = field(default_factory=list)

    @property
    def hold(self) -> bool:
        """Whether every run holds."""
        return all(run.holds for run in [*self.sharded, *self.cpp])


def relative_differences(losses: Sequence[float], reference: Sequence[float]) -> list[float]:
    """Relative difference per step; a NaN counts as infinite."""
    pairs = zip(losses, reference, strict=True)
    differences = (abs(a - b) / max(abs(b), 1e-300) for a, b in pairs)
    return [d if d == d else float("inf") for d in differences]


def cuts_of(key: str, index: int, plan: Plan, outcomes: Sequence[Outcome]) -> list[list[int]]:
    """Borders along the three spatial axes, from the shapes of all ranks' pieces."""
    shape = outcomes[0].layers[index][key.replace("piece", "shape")]
    cuts = [[0, size] for size in shape[2:]]
    stride = plan.ranks
    for length, dim in zip(plan.mesh, plan.dims, strict=True):
        stride //= length
        borders = [0]
        for coordinate in range(length):
            piece = outcomes[coordinate * stride].layers[index][key]
            borders.append(borders[-1] + piece[dim])
        cuts[dim - 2] = borders
    return cuts


def _layer_halo(index: int, plan: Plan, outcomes: Sequence[Outcome]) -> Halo | None:
    layer = outcomes[0].layers[index]
    cuts = cuts_of("piece_in", index, plan, outcomes)
    sizes_in, sizes_out = layer["shape_in"][2:], layer["shape_out"][2:]
    if layer["kind"] == "Conv3d":
        options = [layer["options"][o] for o in ("kernel_size", "stride", "padding", "dilation")]
        reads = [conv_reads(*o, n) for *o, n in zip(*options, sizes_in, strict=True)]
        return halo(cuts, reads, sizes_out)
    if layer["kind"] == "Up":
        reads = [linear_reads(*sizes) for sizes in zip(sizes_in, sizes_out, strict=True)]
        return halo(cuts, reads, sizes_out, cuts_of("piece_out", index, plan, outcomes))
    return None


def _what(layer: dict[str, Any]) -> str:
    if layer["kind"] == "Conv3d":
        return f"conv k{layer['options']['kernel_size'][0]}s{layer['options']['stride'][0]}"
    return {"Up": "resize+cat"}.get(layer["kind"], "norm" if "Norm" in layer["kind"] else "")


def _sent(outcomes: Sequence[Outcome], key: str, layer: str) -> int:
    return sum(outcome.traffic[key].get(layer, 0) for outcome in outcomes)


def _traffic(plan: Plan, outcomes: Sequence[Outcome], itemsize: int, result: RunResult) -> None:
    """Fill in the layers' bytes and the memory limit's halo."""
    steps = max(1, len(result.losses))
    ring = 2 * (plan.ranks - 1)
    for index, layer in enumerate(outcomes[0].layers):
        crossing = _layer_halo(index, plan, outcomes)
        channels_in, channels_out = layer["shape_in"][1], layer["shape_out"][1]
        if crossing is None:
            # A norm: two sums per channel either way; those of backward are its weights' gradient.
            least = backward = ring * 2 * channels_in * itemsize
        else:
            least = crossing.forward * channels_in * itemsize
            backward = min(least, crossing.backward_by_output * channels_out * itemsize)
            backward *= index > 0  # The scan itself needs no gradient.
            backward += ring * layer["weight_bytes"]
            result.halo_bytes += crossing.most_received * channels_in * itemsize
        name, sizes = layer["name"], "x".join(map(str, layer["shape_in"][1:]))
        sent = _sent(outcomes, "forward", name)
        sent_backward = _sent(outcomes, "by_layer", name) // steps - sent
        result.layers.append(
            LayerTraffic(name, _what(layer), sizes, sent, least, sent_backward, backward)
        )


def _result(plan: Plan, outcomes: Sequence[Outcome], bound: float) -> RunResult:
    run = outcomes[0].run
    return RunResult(
        plan.title,
        plan.mesh,
        plan.dims,
        run["losses"],
        [],
        bound,
        statistics.median(run["seconds"] or [0.0]),
        [outcome.run["activation_bytes"] for outcome in outcomes],
        run["state_bytes"],
    )


def gather_runs(
    outcomes: Sequence[tuple[Plan, Sequence[Outcome]]], bound: float, itemsize: int
) -> Runs:
    """Reduce what the ranks handed back to comparable figures.

    Args:
      outcomes: the serial run first, each with its ranks in order.
      bound: largest relative difference of a loss allowed.
      itemsize: bytes of one element.
    """
    serial = _result(*outcomes[0], bound)
    runs = Runs(serial, [])
    for plan, ranks in outcomes[1:]:
        result = _result(plan, ranks, bound)
        result.relative = relative_differences(result.losses, serial.losses)
        _traffic(plan, ranks, itemsize, result)
        result.limit_bytes = serial.activation_bytes[0] // plan.ranks + result.halo_bytes
        for outcome in ranks:
            result.bytes_per_step += outcome.traffic["bytes_sent"] // max(1, len(result.losses))
            for op, count in outcome.traffic["fallbacks"].items():
                result.fallbacks[op] = result.fallbacks.get(op, 0) + count
        result.table = ranks[0].traffic["table"]
        runs.sharded.append(result)
    return runs


def compare_with_cpp(
    program: Path, data: Path, out: Path, runs: Runs, bound: float
) -> list[RunResult]:
    """Run the C++ twin on the same volume and first weights; its ranks are threads.

    Args:
      program: the built example.
      data: file written by `ranks.export`.
      out: folder for its JSON.
      runs: the Python runs, compared by their order.
      bound: largest relative difference of a loss from the Python serial run's.
    """
    file = out / "brain_unet_cpp.json"
    steps = min(COMPARED_STEPS, len(runs.serial.losses))
    subprocess.run([str(program), str(data), str(file), str(steps)], check=True)
    results = []
    for run in json.loads(file.read_text(encoding="utf-8"))["runs"]:
        results.append(
            RunResult(
                title="C++, " + run["title"],
                mesh=tuple(run["mesh"]),
                dims=(),
                losses=run["losses"],
                relative=relative_differences(run["losses"], runs.serial.losses[:steps]),
                bound=bound,
                step_seconds=run["step_seconds"],
                activation_bytes=[],
                state_bytes=0,
                fallbacks=run["fallbacks"],
            )
        )
    return results
