"""Totals and the Markdown table of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardfield.selftest._check import Outcome, Verdict

INTRODUCTION = """# Operators

Made by `shardfield selftest --table`. Each operator of PyTorch's own test list is called on its
sample inputs, the first one cut along each dim in turn, the others plain or cut alike; output and
gradients are compared with the plain op's. Sharded: no rank held more than its part. Gathered:
right, by the counted fallback. Refused: a clear error. Numbers are calls, in brackets the dims that
were cut."""


@dataclass(frozen=True)
class Tally:
    """All outcomes of one operator."""

    operator: str
    outcomes: list[Outcome]

    @property
    def worst(self) -> Verdict:
        """The worst verdict; an operator without a usable sample counts as sharded."""
        return max((o.verdict for o in self.outcomes), default=Verdict.SHARDED)

    def count(self, verdict: Verdict) -> int:
        """How many calls got this verdict."""
        return sum(o.verdict == verdict for o in self.outcomes)


def _cell(tally: Tally, verdict: Verdict) -> str:
    dims = sorted({o.dim for o in tally.outcomes if o.verdict == verdict})
    return f"{tally.count(verdict)} ({' '.join(map(str, dims))})" if dims else ""


def _row(tally: Tally) -> str:
    cells = " | ".join(_cell(tally, v) for v in list(Verdict)[:4])
    return f"| `{tally.operator}` | {cells} |"


def markdown(tallies: Sequence[Tally], shape: Sequence[int]) -> str:
    """A table of calls per operator and verdict, then the totals as the last paragraph."""
    run = [t for t in tallies if t.outcomes]
    right = sum(t.worst <= Verdict.GATHERED for t in run)
    calls = {v: sum(t.count(v) for t in run) for v in Verdict}
    correct = calls[Verdict.SHARDED] + calls[Verdict.GATHERED]
    share = 100 * calls[Verdict.GATHERED] / max(correct, 1)
    lines = [
        INTRODUCTION,
        "",
        "| operator | sharded | gathered | refused | wrong |",
        "| --- | --- | --- | --- | --- |",
    ]
    lines += [_row(t) for t in run]
    mesh = " x ".join(map(str, shape))
    summary = (
        f"Mesh {mesh}: {len(run)} operators, {right} right in every call; {sum(calls.values())} calls: "
        + ", ".join(f"{n} {v.name.lower()}" for v, n in calls.items())
        + f"; {share:.1f} % of the right calls gather."
    )
    return "\n".join(lines) + "\n\n" + summary
