"""Runs every model of the zoo on every placement and writes docs/zoo.md.

    python tests/python/zoo_table.py [pattern]

With a pattern only the models whose name contains it run, and the table is printed, not written.
"""

from __future__ import annotations

import importlib.metadata
import math
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import rank_pool
from test_models import compare_model, every_place, save_oracle
from zoo import ZOO

PACKAGES = {
    "timm": "timm",
    "smp": "segmentation-models-pytorch",
    "monai": "monai",
    "diffusers": "diffusers",
    "transformers": "transformers",
    "torchvision": "torchvision",
}
PAGE = Path(__file__).resolve().parents[2] / "docs" / "zoo.md"
INTRODUCTION = """# The zoo

Published models, unchanged from PyPI, at reduced widths. Made by `python tests/python/zoo_table.py` with
{packages}.

The input is sharded along each spatial dim in turn on 1, 2, 3 and 4 ranks, and along two on a 2 x 2 mesh. Output, input
gradient, every weight gradient and every buffer are compared with one device in float64, training mode, dropout off, and must
agree to 1e-8. Gathers are the report's fallbacks over forward and backward, the worst placement counts. Attention sends
keys and values once to the ranks that cut the tokens, per layer: a transfer, see [attention](operators/attention.md), not a
fallback. `tests/python/test_models.py` runs a part of this in every test run.

A model that draws noise (monai's AutoencoderKL) is compared with one rank of Shardfield: sharded tensors have their own
generator, equal for every number of ranks.

| model | input | placements | right | largest error | gathers |
| --- | --- | --- | --- | --- | --- |
"""


@dataclass
class Row:
    """What the placements of one model gave."""

    name: str
    places: int = 0
    right: int = 0
    error: float = 0.0
    gathers: dict[str, int] = field(default_factory=dict)

    def add(self, results: list[dict]) -> None:
        """Counts one placement that agreed with the oracle."""
        self.right += 1
        self.error = max(self.error, *(r["error"] for r in results))
        for op, count in results[0]["fallbacks"].items():
            self.gathers[op] = max(count, self.gathers.get(op, 0))

    def text(self) -> str:
        """The row in Markdown."""
        shape = " x ".join(map(str, ZOO[self.name].shape))
        gathers = ", ".join(f"`{op}` {n}" for op, n in sorted(self.gathers.items())) or "0"
        return (
            f"| {self.name} | {shape} | {self.places} | {self.right} | {self.error:.0e} | "
            f"{gathers} |"
        )


def run_model(pool_of, name: str, folder: str) -> Row:
    """Every placement of one model; what fails is printed and not counted as right."""
    row = Row(name)
    path = str(Path(folder) / f"{name}.pt")
    case = {"shape": (1,), "function": save_oracle, "name": name, "path": path}
    pool_of(1).run(rank_pool.call_on_mesh, case, limit_s=180)
    for shape, dims in every_place(name):
        row.places += 1
        case = {
            "shape": shape,
            "function": compare_model,
            "name": name,
            "dims": dims,
            "path": path,
        }
        try:
            row.add(pool_of(math.prod(shape)).run(rank_pool.call_on_mesh, case, limit_s=180))
        except rank_pool.RankFailure as failure:
            print(f"{name} {shape} dims {dims}: {failure}", file=sys.stderr)
    return row


def main() -> int:
    """Runs the models; 1 when a placement was not right."""
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    rows = []
    preload = ["shardfield", "shardfield.domain_parallel", "oracle", "zoo_packages"]
    with rank_pool.pools(preload) as pool_of, tempfile.TemporaryDirectory() as folder:
        for name in ZOO:
            if pattern in name:
                rows.append(run_model(pool_of, name, folder))
                print(rows[-1].text(), flush=True)
    if not pattern:
        packages = ", ".join(
            f"{package} {importlib.metadata.version(package)}" for package in PACKAGES.values()
        )
        total = f"{len(rows)} models, {sum(r.places for r in rows)} placements, "
        total += f"{sum(r.right for r in rows)} right, "
        total += f"{sum(not r.gathers for r in rows)} models without a gather."
        table = "\n".join(row.text() for row in rows)
        PAGE.write_text(INTRODUCTION.format(packages=packages) + f"{table}\n\n{total}\n")
    return int(any(row.right < row.places for row in rows))


if __name__ == "__main__":
    sys.exit(main())
