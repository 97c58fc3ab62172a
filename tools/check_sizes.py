#!/usr/bin/env python3
"""Checks that no source file outgrows its budget: 700 lines, tests 900."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".py", ".cmake"}
LIMIT = 700
TEST_LIMIT = 900


def main() -> int:
    """Checks every tracked or new file that git does not ignore."""
    root = Path(__file__).resolve().parent.parent
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    ).stdout.splitlines()
    faults = []
    count = 0
    for name in sorted(set(listed)):
        path = root / name
        if path.suffix not in SUFFIXES or not path.is_file():
            continue
        count += 1
        lines = len(path.read_text().splitlines())
        limit = TEST_LIMIT if name.startswith("tests/") else LIMIT
        if lines > limit:
            faults.append(f"{name}: {lines} lines, the limit is {limit}; split it by topic")
    print("\n".join([*faults, f"check_sizes: {count} files, {len(faults)} faults"]))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
