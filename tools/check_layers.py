#!/usr/bin/env python3
"""Checks that includes only go up the layer order.

A file of one layer may include its own layer and those before it in LAYERS. A public header may
not include a precompiled header. Exits 1 and names file, line and include when one goes down.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LAYERS = [
    "base",
    "spec",
    "comm",
    "exchange",
    "tensor",
    "dispatch",
    "ops",
    "fft",
    "attention",
    "points",
    "graph",
    "checkpoint",
    "plan",
]
INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](shardfield|bindings)/([^">]+)[">]')


def faults_of(path: Path, layer: str) -> list[str]:
    """The includes of one file that its layer may not have."""
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        match = INCLUDE.match(line)
        if not match:
            continue
        top, rest = match.groups()
        target = rest.split("/")[0]
        where = f"{path}:{number}"
        if rest.endswith("precompiled.h"):
            found.append(f"{where}: precompiled headers are never included by hand")
        elif top == "bindings":
            found.append(f"{where}: {layer} includes bindings/{rest}, which lies below the core")
        elif "/" not in rest:
            found.append(f"{where}: {layer} includes the umbrella header {rest}")
        elif target not in LAYERS:
            found.append(
                f"{where}: shardfield/{target} is no layer; add it to tools/check_layers.py"
            )
        elif LAYERS.index(target) > LAYERS.index(layer):
            found.append(f"{where}: {layer} includes {target}, which lies below it")
    return found


def main() -> int:
    """Checks every source file of the core."""
    root = Path(__file__).resolve().parent.parent
    faults: list[str] = []
    count = 0
    for path in sorted((root / "shardfield").glob("*/**/*")):
        if path.suffix not in {".h", ".cpp", ".cu", ".cuh"}:
            continue
        count += 1
        layer = path.relative_to(root / "shardfield").parts[0]
        if layer not in LAYERS:
            faults.append(
                f"{path}: shardfield/{layer} is no layer; add it to tools/check_layers.py"
            )
        else:
            faults += faults_of(path, layer)
    for fault in faults:
        print(fault.replace(f"{root}/", ""))
    print(f"check_layers: {count} files, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
