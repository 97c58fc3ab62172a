"""A small MACE with random weights, of MACE's own classes. Nothing in this file knows about ranks."""

from __future__ import annotations

import os
import warnings

import numpy as np
import torch
from torch import nn

from .quartz import ELEMENTS

# MACE makes torch.load trust every file, for the whole process and with a warning: not beyond here.
_TRUST = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
_before = os.environ.get(_TRUST)
warnings.filterwarnings("ignore", message=f".*{_TRUST}")
from mace import modules  # noqa: E402  before e3nn, which cannot load its constants otherwise

# isort: split
from e3nn import o3  # noqa: E402

if _before is None:
    os.environ.pop(_TRUST, None)


def small_mace(cutoff: float = 4.0, channels: int = 8, layers: int = 2) -> nn.Module:
    """MACE's own ScaleShiftMACE with vector features and three-body products, float64."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    block = modules.interaction_classes["RealAgnosticResidualInteractionBlock"]
    try:
        return modules.ScaleShiftMACE(
            r_max=cutoff,
            num_bessel=8,
            num_polynomial_cutoff=5,
            max_ell=2,
            interaction_cls=block,
            interaction_cls_first=block,
            num_interactions=layers,
            num_elements=len(ELEMENTS),
            hidden_irreps=o3.Irreps(f"{channels}x0e + {channels}x1o"),
            MLP_irreps=o3.Irreps("16x0e"),
            atomic_energies=np.array([-432.1, -291.3]),
            avg_num_neighbors=20.0,
            atomic_numbers=ELEMENTS,
            correlation=3,
            gate=torch.nn.functional.silu,
            atomic_inter_scale=1.0,
            atomic_inter_shift=0.0,
        )
    finally:
        torch.set_default_dtype(default)
