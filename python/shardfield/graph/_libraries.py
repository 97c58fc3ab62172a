"""Finds the partitioners that PyPI packages bring, and tells the core where they are."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
from pathlib import Path

from shardfield._core import core

# Package, the library's file inside of it, and the method that it serves.
PACKAGES = (("cmeel-metis", "libmetis.so", "metis"), ("kahip", "libkahip.so", "kahip"))


@functools.cache
def find_libraries() -> None:
    """Adds the libraries of installed packages to the core's search paths, once. Local."""
    for package, file_name, method in PACKAGES:
        try:
            files = importlib.metadata.files(package) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for entry in files:
            if entry.name == file_name:
                core.graph_add_library_path(method, str(Path(str(entry.locate()))))


def methods() -> list[str]:
    """Methods that `partition` has here: always "hilbert", "morton" and "rcb"; "metis", "kahip" and
    "scotch" where their libraries are found. Local.
    """
    find_libraries()
    return core.graph_methods()
