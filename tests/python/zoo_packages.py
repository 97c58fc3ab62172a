"""Imports every package of the zoo: once in the fork server instead of once per rank."""

from __future__ import annotations

import os
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)

import torchvision_operators  # noqa: E402, F401  before torchvision

# isort: split
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
