#!/usr/bin/env python3
"""Runs clang-tidy on the given files, some at a time, and prints only what it finds.

The compile commands of a build tree name gcc's precompiled header, which clang cannot read, so they
are rewritten without it first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOOL = Path(sys.executable).parent / "clang-tidy"


def clean_commands(build: Path) -> Path:
    """Writes compile commands without precompiled headers; returns their folder."""
    commands = json.loads((build / "compile_commands.json").read_text())
    for entry in commands:
        words = entry["command"].split(" ")
        kept: list[str] = []
        skip = False
        for word in words:
            if skip:
                skip = False
                if "cmake_pch" in word:
                    kept.pop()
                    continue
            if word == "-include":
                skip = True
            if word != "-Winvalid-pch":
                kept.append(word)
        entry["command"] = " ".join(kept)
    folder = build / "tidy"
    folder.mkdir(exist_ok=True)
    (folder / "compile_commands.json").write_text(json.dumps(commands))
    return folder


def files_built(folder: Path) -> set[Path]:
    """The files that the build compiles; those of libraries that are not installed are not."""
    commands = json.loads((folder / "compile_commands.json").read_text())
    return {Path(entry["directory"], entry["file"]).resolve() for entry in commands}


def check(folder: Path, path: str) -> bool:
    """Checks one file; true when clang-tidy finds nothing."""
    start = time.monotonic()
    run = subprocess.run(
        [str(TOOL), "-p", str(folder), "--quiet", path],
        capture_output=True,
        text=True,
        check=False,
    )
    print(f"{'ok  ' if run.returncode == 0 else 'FAIL'} {time.monotonic() - start:5.1f} s  {path}")
    if run.returncode != 0:
        print(run.stdout, flush=True)
    return run.returncode == 0


def main() -> int:
    """Checks every file given on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", type=Path, required=True)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("files", nargs="*")
    args = parser.parse_args()
    folder = clean_commands(args.build)
    built = files_built(folder)
    files = []
    for path in args.files:
        if Path(path).exists() and Path(path).resolve() not in built:
            print(f"left out, as this build does not compile it: {path}")
        else:
            files.append(path)
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda path: check(folder, path), files))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main())
