"""Published models, unchanged from PyPI, at widths that two cores train in well under a second.

Only constructor arguments the packages themselves offer are used (channels, depths, dropout 0, so
that a serial run is an exact oracle); no code of a model is touched. `timm` and
`segmentation_models_pytorch` import torchvision, whose compiled part does not load beside this
torch: two of its operators must be declared before the import, as nothing here calls them.
requirements/test*.txt say what to install, and how.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn


def without_dropout(model: torch.nn.Module) -> torch.nn.Module:
    """The model with its dropout layers at p = 0: masks of sharded tensors are not the stock ones."""
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def _declare_torchvision_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_TORCHVISION = _declare_torchvision_operators()
warnings.filterwarnings("ignore", category=FutureWarning)
warnings.filterwarnings("ignore", category=DeprecationWarning)

import segmentation_models_pytorch as smp  # noqa: E402
import timm  # noqa: E402
from monai.networks import nets  # noqa: E402
from monai.networks.blocks import (  # noqa: E402
    UnetOutBlock,
    UnetrBasicBlock,
    UnetrPrUpBlock,
    UnetrUpBlock,
)


class SwinUnetrConvParts(nn.Module):
    """The convolutional blocks of monai's SwinUNETR in its own order, the transformer left out."""

    def __init__(self) -> None:
        super().__init__()
        block: dict[str, Any] = {"spatial_dims": 3, "norm_name": "instance"}
        self.encoder1 = UnetrBasicBlock(
            in_channels=1, out_channels=4, kernel_size=3, stride=1, res_block=True, **block
        )
        self.encoder2 = UnetrBasicBlock(
            in_channels=4, out_channels=8, kernel_size=3, stride=2, res_block=True, **block
        )
        self.encoder10 = UnetrBasicBlock(
            in_channels=8, out_channels=8, kernel_size=3, stride=2, res_block=True, **block
        )
        self.project = UnetrPrUpBlock(
            in_channels=8, out_channels=8, num_layer=0, kernel_size=3, stride=1,
            upsample_kernel_size=2, conv_block=True, res_block=True, **block,
        )  # fmt: skip
        self.decoder = UnetrUpBlock(
            in_channels=8,
            out_channels=4,
            kernel_size=3,
            upsample_kernel_size=2,
            res_block=True,
            **block,
        )
        self.out = UnetOutBlock(spatial_dims=3, in_channels=4, out_channels=2)

    def forward(self, x: Tensor) -> Tensor:
        first = self.encoder1(x)
        second = self.encoder2(first)
        third = self.encoder10(second)
        return self.out(self.decoder(second + self.project(third), first))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "monai.UNet": (
        lambda: nets.UNet(
            spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2),
            num_res_units=2,
        ),
        (1, 1, 12, 8, 16),
    ),
    "monai.UNet-batch-2d": (
        lambda: nets.UNet(
            spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2),
            num_res_units=1, norm="batch", up_kernel_size=5,
        ),
        (2, 1, 28, 20),
    ),
    "monai.BasicUNet": (
        lambda: nets.BasicUNet(
            spatial_dims=2, in_channels=1, out_channels=2, features=(4, 4, 8, 8, 16, 4)
        ),
        (1, 1, 37, 34),
    ),
    "monai.SegResNet": (
        lambda: nets.SegResNet(
            spatial_dims=3, init_filters=8, in_channels=1, out_channels=2, blocks_down=(1, 2),
            blocks_up=(1,),
        ),
        (1, 1, 12, 8, 10),
    ),
    "monai.VNet": (
        lambda: without_dropout(nets.VNet(spatial_dims=2, in_channels=1, out_channels=2)),
        (1, 1, 48, 32),
    ),
    "monai.DynUNet": (
        lambda: nets.DynUNet(
            spatial_dims=3, in_channels=1, out_channels=2, kernel_size=[3, 3, 3], strides=[1, 2, 2],
            upsample_kernel_size=[2, 2], filters=[4, 8, 16], res_block=True,
        ),
        (1, 1, 16, 12, 20),
    ),
    "monai.AttentionUnet": (
        lambda: nets.AttentionUnet(
            spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16), strides=(2, 2)
        ),
        (1, 1, 28, 20),
    ),
    "monai.SwinUNETR-conv-parts": (SwinUnetrConvParts, (1, 1, 16, 12, 8)),
    "timm.resnet18": (lambda: timm.create_model("resnet18", num_classes=3), (2, 3, 72, 64)),
    "timm.convnext": (
        lambda: timm.create_model(
            "convnext_atto", num_classes=3, dims=(8, 8, 16, 16), depths=(1, 1, 2, 1)
        ),
        (2, 3, 80, 64),
    ),
    "smp.Unet": (
        lambda: smp.Unet(
            "resnet18", encoder_weights=None, encoder_depth=3, decoder_channels=(16, 8, 8),
            classes=2,
        ),
        (2, 3, 40, 32),
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    """The model in float64 and training mode, with the same weights in every process."""
    torch.manual_seed(0)
    return MODELS[name][0]().double().train()


def example(name: str) -> Tensor:
    """The model's input: the same normal random numbers in every process."""
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(MODELS[name][1], generator=generator, dtype=torch.float64).to(
        torch.get_default_device()
    )
