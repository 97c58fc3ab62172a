"""Imports every package of the zoo: once in the fork server instead of once per rank.

torchvision's compiled part does not load beside this torch: two of its operators must be declared
before the import, as nothing here calls them.
"""

from __future__ import annotations

import os
import warnings

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)


def _declare_torchvision_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_TORCHVISION = _declare_torchvision_operators()

import diffusers  # noqa: E402, F401
import segmentation_models_pytorch  # noqa: E402, F401
import timm  # noqa: E402, F401
import torchvision  # noqa: E402, F401
import transformers  # noqa: E402, F401
from diffusers import UNet2DModel  # noqa: E402, F401
from monai.networks import nets  # noqa: E402, F401
from transformers import (  # noqa: E402, F401
    SegformerForSemanticSegmentation,
    ViTForImageClassification,
)
