"""Every operator of PyTorch's own test list, its inputs cut along every dim."""

from __future__ import annotations

import pytest
from shardfield.selftest import Outcome, Verdict, check_operator, operator_names
from shardfield.selftest._table import Tally, markdown

CHUNK = 24
NAMES = list(dict.fromkeys(operator_names()))


def check_chunk(mesh, names: list[str]) -> list[Outcome]:
    outcomes = []
    for name in names:
        outcomes += check_operator(mesh, name)
        if outcomes and outcomes[-1].verdict == Verdict.HUNG:
            break
    return outcomes


@pytest.mark.parametrize(("shape", "every"), [((2,), 1), ((3,), 4), ((2, 2), 4)])
def test_no_operator_is_wrong_hangs_or_crashes(run_mesh, shape, every):
    names = NAMES[len(shape) - 1 :: every]
    outcomes: list[Outcome] = []
    for i in range(0, len(names), CHUNK):
        chunk = names[i : i + CHUNK]
        of_ranks = run_mesh(shape, check_chunk, names=chunk, limit_s=240)
        outcomes += [max(same, key=lambda o: o.verdict) for same in zip(*of_ranks, strict=True)]
    bad = [o for o in outcomes if o.verdict >= Verdict.WRONG]
    assert not bad, "\n".join(map(str, bad))
    refused = {o.operator for o in outcomes if o.verdict == Verdict.REFUSED}
    right = {o.operator for o in outcomes} - refused
    assert len(right) >= 0.93 * len(right | refused), sorted(refused)


def test_the_table_names_calls_and_dims():
    outcomes = [
        Outcome("flip", sample, dim, "plain", verdict, "")
        for sample, dim, verdict in (
            (0, 0, Verdict.SHARDED),
            (0, 1, Verdict.GATHERED),
            (1, 0, Verdict.SHARDED),
            (1, 2, Verdict.SHARDED),
        )
    ]
    text = markdown([Tally("flip", outcomes), Tally("none", [])], [2, 2])
    assert "| `flip` | 3 (0 2) | 1 (1) |  |  |" in text
    assert "none" not in text
    assert "Mesh 2 x 2: 1 operators, 1 right in every call; 4 calls: 3 sharded, 1 gathered" in text
    assert "25.0 % of the right calls gather" in text
