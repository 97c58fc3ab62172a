"""A compact 3-D U-Net in plain PyTorch. Nothing in this file knows about several ranks.

`examples/cpp/brain_unet.cpp` defines the same network over `torch::nn`, name for name.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3x3x3 convolutions, each followed by an instance norm and a GELU."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv3d(inputs, outputs, 3, padding=1, bias=False)
        self.norm1 = nn.InstanceNorm3d(outputs, affine=True)
        self.conv2 = nn.Conv3d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.InstanceNorm3d(outputs, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        x = F.gelu(self.norm1(self.conv1(x)))
        return F.gelu(self.norm2(self.conv2(x)))


class Up(nn.Module):
    """Resize to the skip's size, so that odd sizes work too, and join both along the channels."""

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = F.interpolate(x, size=skip.shape[2:], mode="trilinear")
        return torch.cat([skip, x], dim=1)


class UNet(nn.Module):
    """Three resolutions, strided convolutions down, trilinear interpolation up, skips by `cat`.

    Input ``(N, 1, D, H, W)`` with any sizes of 4 or more, odd ones too; output
    ``(N, classes, D, H, W)``.
    """

    def __init__(self, classes: int = 3, width: int = 8) -> None:
        super().__init__()
        self.enter = Block(1, width)
        self.down1 = nn.Conv3d(width, 2 * width, 3, stride=2, padding=1)
        self.mid1 = Block(2 * width, 2 * width)
        self.down2 = nn.Conv3d(2 * width, 4 * width, 3, stride=2, padding=1)
        self.bottom = Block(4 * width, 4 * width)
        self.thin2 = nn.Conv3d(4 * width, 2 * width, 1)
        self.up2 = Up()
        self.mid2 = Block(4 * width, 2 * width)
        self.thin1 = nn.Conv3d(2 * width, width, 1)
        self.up1 = Up()
        self.leave = Block(2 * width, width)
        self.head = nn.Conv3d(width, classes, 1)
        with torch.no_grad():  # Fine features lead at first: they learn the borders soonest.
            for parameter in [*self.thin1.parameters(), *self.thin2.parameters()]:
                parameter.mul_(0.1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.enter(x)
        b = self.mid1(self.down1(a))
        c = self.bottom(self.down2(b))
        b = self.mid2(self.up2(self.thin2(c), b))
        a = self.leave(self.up1(self.thin1(b), a))
        return self.head(a)


def dice_and_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean of the soft Dice loss over the classes and the cross-entropy.

    Args:
      logits: ``(N, C, D, H, W)``.
      labels: ``(N, D, H, W)``, int64.

    Returns:
      A scalar.
    """
    classes = torch.arange(logits.shape[1]).view(1, -1, 1, 1, 1)
    truth = (labels.unsqueeze(1) == classes).to(logits.dtype)
    guess = logits.softmax(dim=1)
    overlap = (guess * truth).sum(dim=(0, 2, 3, 4))
    total = (guess + truth).sum(dim=(0, 2, 3, 4))
    dice = 1.0 - ((2.0 * overlap + 1.0) / (total + 1.0)).mean()
    return dice + F.cross_entropy(logits, labels)
