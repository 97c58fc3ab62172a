"""A quartz crystal built with ASE."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from ase import Atoms
from ase.spacegroup import crystal
from torch import Tensor, nn

ELEMENTS = [8, 14]


def quartz(*repeats: int, rattle: float = 0.05) -> Atoms:
    """A supercell of alpha-quartz, SiO2, of 9 atoms a cell, shaken by normal displacements.

    Args:
      repeats: cells along a, b and c.
      rattle: standard deviation of the displacements in Angstrom.
    """
    cell = crystal(
        ["Si", "O"],
        [(0.4697, 0, 1 / 3), (0.4135, 0.2669, 0.2144)],
        spacegroup=152,
        cellpar=[4.9137, 4.9137, 5.4047, 90, 90, 120],
    )
    atoms = cell.repeat(repeats)
    atoms.rattle(rattle, seed=3)
    return atoms


def one_hot(numbers: Any) -> Tensor:
    """Element of each atom as MACE's node attributes, ``(n, 2)``, float64."""
    place = np.searchsorted(ELEMENTS, numbers)
    return nn.functional.one_hot(torch.from_numpy(place), len(ELEMENTS)).double()
