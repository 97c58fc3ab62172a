"""`shardfield selftest`: every operator of PyTorch's own list on sharded inputs."""

from __future__ import annotations

import argparse
import re

from shardfield.selftest._check import Verdict, operator_names
from shardfield.selftest._ranks import Ranks
from shardfield.selftest._table import Tally, markdown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `shardfield selftest`."""
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="ranks per mesh axis")
    parser.add_argument("--ops", default="", help="regular expression that the name must contain")
    parser.add_argument("--table", help="write the table to this Markdown file")
    parser.add_argument(
        "--verbose", action="store_true", help="print every call that gathers or is refused"
    )


def _tell(tally: Tally, least: Verdict) -> None:
    print(f"{tally.operator}: {tally.worst.name.lower()}", flush=True)
    for outcome in tally.outcomes:
        if outcome.verdict >= least:
            reason = outcome.detail.splitlines()[0][:200] if outcome.detail else ""
            print(
                f"  sample {outcome.sample} dim {outcome.dim} others {outcome.others}: "
                f"{outcome.verdict.name.lower()}: {reason}",
                flush=True,
            )


def run(options: argparse.Namespace) -> int:
    """Runs the operators and prints the totals; 1 when a call was wrong, hung or crashed."""
    names = [n for n in dict.fromkeys(operator_names()) if re.search(options.ops, n)]
    least = Verdict.GATHERED if options.verbose else Verdict.WRONG
    tallies: list[Tally] = []
    for name, outcomes in Ranks(options.ranks).check(names):
        tallies.append(Tally(name, outcomes))
        if tallies[-1].worst >= least:
            _tell(tallies[-1], least)
    text = markdown(tallies, options.ranks)
    print(text.split("\n\n")[-1] if len(tallies) > 40 else text)
    if options.table:
        with open(options.table, "w", encoding="utf-8") as file:
            file.write(text + "\n")
    return int(any(tally.worst >= Verdict.WRONG for tally in tallies))
