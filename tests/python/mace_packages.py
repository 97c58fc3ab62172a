"""Imports MACE and e3nn: once in the fork server instead of once per rank."""

from __future__ import annotations

import sys
from pathlib import Path

import torchvision_operators  # noqa: F401  MACE's imports end in torchvision

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "python"))
import atomistic.model
import atomistic.on_ranks  # noqa: F401
