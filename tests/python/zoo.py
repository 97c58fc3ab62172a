"""Published models, unchanged from PyPI, at widths that two cores train in about a second.

Each entry calls a package's own constructor with arguments the package offers (fewer channels,
blocks or heads, dropout 0 so that a serial run is an exact oracle); no code of a model is touched.
The packages are imported when a model is built, so that listing the zoo costs nothing;
`zoo_packages` imports them all. requirements/test*.txt say what to install, and how.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Model:
    """One published model and the input it is run on.

    Args:
        build: makes the model; the weights come from the default generator.
        shape: of the input, (batch, channels, *spatial).
        output: picks the tensor to compare from what the model returns.
        draws: True when the forward pass draws noise: the oracle then is one rank of Shardfield,
            as sharded tensors have their own generator, equal for every number of ranks.
        everywhere: also run along each dim on 1, 3 and 4 ranks in every test run.
        only_two_ranks: in a test run; the table has them all.
    """

    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    output: Callable[[Any], Tensor] = lambda out: out
    draws: bool = False
    everywhere: bool = False
    only_two_ranks: bool = False

    @property
    def spatial_dims(self) -> tuple[int, ...]:
        """The dims of the input that are sharded."""
        return tuple(range(2, len(self.shape)))


def _timm(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import timm

        return timm.create_model(name, num_classes=3, **options)

    return build


def _mixer() -> nn.Module:
    from timm.models.mlp_mixer import MlpMixer

    return MlpMixer(3, img_size=(48, 64), patch_size=8, num_blocks=2, embed_dim=24)


def _smp(name: str, encoder: str = "resnet18", **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        import segmentation_models_pytorch as smp

        return getattr(smp, name)(encoder, encoder_weights=None, classes=2, **options)

    return build


def _monai(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from monai.networks import nets

        return getattr(nets, name)(**options)

    return build


class _AtTimestep(nn.Module):
    """A denoising model at one timestep: a function of the image alone."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model(x, 3)


def _diffusers(kinds: tuple[str, str]) -> Callable[[], nn.Module]:
    down, up = kinds

    def build() -> nn.Module:
        from diffusers import UNet2DModel

        return _AtTimestep(
            UNet2DModel(
                in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 16),
                norm_num_groups=4, attention_head_dim=4, add_attention=down != "DownBlock2D",
                down_block_types=("DownBlock2D", down), up_block_types=(up, "UpBlock2D"),
            )
        )  # fmt: skip

    return build


def _segformer() -> nn.Module:
    from transformers import SegformerConfig, SegformerForSemanticSegmentation

    return SegformerForSemanticSegmentation(
        SegformerConfig(
            depths=[1] * 4, hidden_sizes=[8, 8, 16, 16], num_attention_heads=[1, 1, 2, 2],
            decoder_hidden_size=16, num_labels=2, hidden_dropout_prob=0, drop_path_rate=0,
            attention_probs_dropout_prob=0, classifier_dropout_prob=0,
        )
    )  # fmt: skip


def _transformers_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            image_size=(48, 64), patch_size=8, num_labels=3, hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


def _torchvision(name: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        from torchvision import models

        owner = next(m for m in (models, models.segmentation, models.video) if hasattr(m, name))
        return getattr(owner, name)(weights=None, **options)

    return build


class SwinUnetrConvParts(nn.Module):
    """The convolutional blocks of monai's SwinUNETR in its own order, the transformer left out."""

    def __init__(self) -> None:
        super().__init__()
        from monai.networks.blocks import (
            UnetOutBlock,
            UnetrBasicBlock,
            UnetrPrUpBlock,
            UnetrUpBlock,
        )

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


_TINY_VIT: dict[str, Any] = {"embed_dim": 24, "depth": 2, "num_heads": 2, "img_size": (48, 64)}

ZOO: dict[str, Model] = {
    "timm.resnet18": Model(_timm("resnet18"), (2, 3, 72, 64), everywhere=True),
    "timm.convnext": Model(
        _timm("convnext_atto", dims=(8, 8, 16, 16), depths=(1, 1, 2, 1)),
        (2, 3, 80, 64),
        everywhere=True,
    ),
    "timm.efficientnet": Model(_timm("efficientnet_b0"), (2, 3, 63, 72)),
    "timm.densenet": Model(
        _timm("densenet121", growth_rate=8, block_config=(2, 2, 2, 2)), (2, 3, 67, 80)
    ),
    "timm.hrnet": Model(_timm("hrnet_w18_small"), (2, 3, 64, 96)),
    "timm.mobilenet": Model(_timm("mobilenetv3_small_050"), (2, 3, 77, 64)),
    "timm.regnet": Model(_timm("regnety_002"), (2, 3, 65, 72)),
    "timm.vit": Model(_timm("vit_tiny_patch16_224", **_TINY_VIT), (2, 3, 48, 64)),
    "timm.deit": Model(
        _timm("deit_tiny_distilled_patch16_224", **_TINY_VIT), (2, 3, 48, 64)
    ),
    "timm.swin": Model(
        _timm(
            "swin_tiny_patch4_window7_224", img_size=(56, 112), embed_dim=12, depths=(2, 2),
            num_heads=(1, 2),
        ),
        (2, 3, 56, 112),
    ),
    "timm.mixer": Model(_mixer, (2, 3, 48, 64)),
    "smp.Unet": Model(
        _smp("Unet", encoder_depth=3, decoder_channels=(16, 8, 8)), (2, 3, 40, 32), everywhere=True
    ),
    "smp.Unet-whole": Model(_smp("Unet", "mobilenet_v2"), (2, 3, 64, 96)),
    "smp.UnetPlusPlus": Model(
        _smp("UnetPlusPlus", encoder_depth=3, decoder_channels=(16, 8, 8)), (2, 3, 40, 48)
    ),
    "smp.FPN": Model(_smp("FPN", decoder_dropout=0.0), (2, 3, 64, 96)),
    "smp.DeepLabV3Plus": Model(
        _smp("DeepLabV3Plus", decoder_channels=16, decoder_aspp_dropout=0.0), (2, 3, 64, 80)
    ),
    "smp.PSPNet": Model(_smp("PSPNet", psp_dropout=0.0), (2, 3, 56, 72)),
    "monai.UNet": Model(
        _monai(
            "UNet", spatial_dims=3, in_channels=1, out_channels=2, channels=(4, 8, 16),
            strides=(2, 2), num_res_units=2,
        ),
        (1, 1, 12, 8, 16),
        everywhere=True,
    ),
    "monai.UNet-batch-2d": Model(
        _monai(
            "UNet", spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16),
            strides=(2, 2), num_res_units=1, norm="batch", up_kernel_size=5,
        ),
        (2, 1, 28, 20),
        everywhere=True,
    ),
    "monai.BasicUNet": Model(
        _monai(
            "BasicUNet", spatial_dims=2, in_channels=1, out_channels=2,
            features=(4, 4, 8, 8, 16, 4),
        ),
        (1, 1, 37, 34),
        everywhere=True,
    ),
    "monai.SegResNet": Model(
        _monai(
            "SegResNet", spatial_dims=3, init_filters=8, in_channels=1, out_channels=2,
            blocks_down=(1, 2), blocks_up=(1,),
        ),
        (1, 1, 12, 8, 10),
        everywhere=True,
    ),
    "monai.VNet": Model(
        _monai("VNet", spatial_dims=2, in_channels=1, out_channels=2),
        (1, 1, 48, 32),
        everywhere=True,
    ),
    "monai.DynUNet": Model(
        _monai(
            "DynUNet", spatial_dims=3, in_channels=1, out_channels=2, kernel_size=[3, 3, 3],
            strides=[1, 2, 2], upsample_kernel_size=[2, 2], filters=[4, 8, 16], res_block=True,
        ),
        (1, 1, 16, 12, 20),
        everywhere=True,
    ),
    "monai.AttentionUnet": Model(
        _monai(
            "AttentionUnet", spatial_dims=2, in_channels=1, out_channels=2, channels=(4, 8, 16),
            strides=(2, 2),
        ),
        (1, 1, 28, 20),
        everywhere=True,
    ),
    "monai.SwinUNETR-conv-parts": Model(SwinUnetrConvParts, (1, 1, 16, 12, 8), everywhere=True),
    "monai.SwinUNETR": Model(
        _monai(
            "SwinUNETR", in_channels=1, out_channels=2, feature_size=12, depths=(2, 1, 1, 1),
            num_heads=(1, 1, 2, 2), spatial_dims=2,
        ),
        (1, 1, 96, 64),
    ),
    "monai.SwinUNETR-3d": Model(
        _monai(
            "SwinUNETR", in_channels=1, out_channels=2, feature_size=12, depths=(1, 1, 1, 1),
            num_heads=(1, 1, 2, 2), spatial_dims=3,
        ),
        (1, 1, 64, 32, 32),
        only_two_ranks=True,
    ),
    "monai.UNETR": Model(
        _monai(
            "UNETR", in_channels=1, out_channels=2, img_size=(32, 16, 16), feature_size=8,
            hidden_size=24, mlp_dim=32, num_heads=2,
        ),
        (1, 1, 32, 16, 16),
    ),
    "monai.HighResNet": Model(
        _monai("HighResNet", spatial_dims=3, in_channels=1, out_channels=2), (1, 1, 12, 10, 9)
    ),
    "monai.AutoencoderKL": Model(
        _monai(
            "AutoencoderKL", spatial_dims=3, in_channels=1, out_channels=1, channels=(8, 8),
            latent_channels=2, num_res_blocks=1, norm_num_groups=4, attention_levels=(False, True),
        ),
        (1, 1, 12, 8, 8),
        output=lambda out: out[0],
        draws=True,
    ),
    "diffusers.UNet2DModel": Model(
        _diffusers(("AttnDownBlock2D", "AttnUpBlock2D")),
        (2, 1, 24, 20),
        output=lambda out: out.sample,
    ),
    "diffusers.UNet2DModel-conv": Model(
        _diffusers(("DownBlock2D", "UpBlock2D")), (2, 1, 26, 22), output=lambda out: out.sample
    ),
    "transformers.Segformer": Model(
        _segformer, (2, 3, 64, 96), output=lambda out: out.logits
    ),
    "transformers.ViT": Model(
        _transformers_vit, (2, 3, 48, 64), output=lambda out: out.logits
    ),
    "torchvision.resnet50": Model(_torchvision("resnet50", num_classes=3), (2, 3, 65, 72)),
    "torchvision.fcn_resnet50": Model(
        _torchvision("fcn_resnet50", num_classes=2, weights_backbone=None),
        (2, 3, 49, 56),
        output=lambda out: out["out"],
    ),
    "torchvision.r3d_18": Model(_torchvision("r3d_18", num_classes=3), (1, 3, 8, 32, 24)),
}  # fmt: skip


def _without_dropout(model: nn.Module) -> nn.Module:
    # Masks of sharded tensors are not the stock generator's.
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


@functools.lru_cache(maxsize=1)
def _built(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    import zoo_packages  # noqa: F401

    torch.manual_seed(0)
    model = _without_dropout(ZOO[name].build().double().train())
    return model, {n: b.clone() for n, b in model.named_buffers()}


def build(name: str) -> nn.Module:
    """The model in float64 and training mode, dropout off, the same weights in every process.

    The last model is kept and handed out again as it was made, without gradients.
    """
    model, buffers = _built(name)
    model.zero_grad(set_to_none=True)
    for n, buffer in model.named_buffers():
        buffer.data.copy_(buffers[n])
    return model


def example(name: str) -> Tensor:
    """The model's input: the same normal random numbers in every process."""
    generator = torch.Generator("cpu").manual_seed(1)
    return torch.randn(ZOO[name].shape, generator=generator, dtype=torch.float64).to(
        torch.get_default_device()
    )
