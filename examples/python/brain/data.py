"""The MNI152 T1 template with its grey- and white-matter maps, as shipped inside nilearn's wheel.

nilearn is located, never imported, so it can be installed with ``--no-deps``.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import nibabel
import numpy as np
import torch
import torch.nn.functional as F

CLASSES = ("background", "grey matter", "white matter")
_FILES = {
    "scan": "mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz",
    "grey": "mni_icbm152_gm_tal_nlin_sym_09a_converted.nii.gz",
    "white": "mni_icbm152_wm_tal_nlin_sym_09a_converted.nii.gz",
}


@dataclass
class Brain:
    """One labelled volume.

    Attributes:
      scan: normalised intensities, ``(1, 1, D, H, W)``, floating.
      labels: class per voxel, ``(1, D, H, W)``, int64, indices into ``CLASSES``.
      millimetres: edge of a voxel.
    """

    scan: torch.Tensor
    labels: torch.Tensor
    millimetres: float


def nilearn_folder() -> Path:
    """Folder of the installed nilearn package.

    Raises:
      FileNotFoundError: nilearn is not installed.
    """
    spec = importlib.util.find_spec("nilearn")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(
            "nilearn, whose wheel carries the brain volume, is not installed; "
            "run `pip install --no-deps nilearn`"
        )
    return Path(next(iter(spec.submodule_search_locations)))


def licence_note() -> str:
    """Quote what the wheel says of the data's origin and licence, to be kept beside results."""
    return wheel_note(
        "Brain volume: MNI ICBM152 2009a template", _FILES.values(), "icbm152_2009.rst"
    )


def wheel_note(subject: str, files: Iterable[str], description: str) -> str:
    """Quote nilearn's description of a data set and its own licence below a heading."""
    folder = nilearn_folder()
    dist = importlib.metadata.distribution("nilearn")
    parts = [
        f"{subject}, from the wheel of nilearn {dist.version}",
        "Files: " + ", ".join(files),
        "",
        "== What the wheel says of the data set ==",
        (folder / "datasets" / "description" / description).read_text(encoding="utf-8").strip(),
    ]
    for file in dist.files or []:
        if file.name.upper().startswith("LICEN"):
            text = Path(str(dist.locate_file(file))).read_text(encoding="utf-8").strip()
            parts += ["", "== Licence of the nilearn package itself ==", text]
    return "\n".join(parts) + "\n"


def _read(name: str) -> torch.Tensor:
    path = nilearn_folder() / "datasets" / "data" / _FILES[name]
    if not path.exists():
        version = importlib.metadata.version("nilearn")
        raise FileNotFoundError(f"nilearn {version} has no {path.name}; install nilearn 0.14.1")
    image = nibabel.load(path)
    array = np.asanyarray(image.dataobj).astype(np.float64) / 255.0
    return torch.from_numpy(array)[None, None]


def _shrink(volume: torch.Tensor, factor: int) -> torch.Tensor:
    """Block means; the last block of an odd axis is what is left of it, so sizes stay odd."""
    if factor == 1:
        return volume
    return F.avg_pool3d(volume, factor, ceil_mode=True)


def load(factor: int, dtype: torch.dtype) -> Brain:
    """Read the volume, ``factor`` times coarser along each axis (1 gives 197 x 233 x 189 voxels).

    Args:
      factor: edge of the averaged blocks in millimetres.
      dtype: floating type of the scan.

    Returns:
      The scan, zero mean and unit deviation inside the head, and the likeliest class per voxel.
    """
    scan, grey, white = (_shrink(_read(name), factor) for name in _FILES)
    inside = scan > 0.05
    scan = ((scan - scan[inside].mean()) / scan[inside].std()).clamp(-2.0, 2.0)
    rest = (1.0 - grey - white).clamp_min(0.0)
    labels = torch.cat([rest, grey, white], dim=1).argmax(dim=1)
    return Brain(scan.to(dtype).contiguous(), labels.contiguous(), float(factor))
