"""MobileNetV2 for 32x32 images: about 2.2 million parameters in 20 blocks.

Unlike the network for 224x224 (Sandler et al., 2018), the first convolution and the second group of blocks keep their
resolution: 32x32 shrinks to 4x4 before the pooling, and not to 1x1.
"""

from __future__ import annotations

import torch
from torch import nn

from hoop.errors import InvalidArgument
from hoop.models.seeding import seeded

GROUPS = (
    # expansion, channels out, blocks, stride of the first
    (1, 16, 1, 1),
    (6, 24, 2, 1),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
STEM, HEAD = 32, 1280


def _norm(kind: str, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if kind == "batch" else nn.GroupNorm(channels // 8, channels)


def _convolution(norm: str, fan_in: int, fan_out: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """Convolution, normalisation, ReLU6."""
    convolution = nn.Conv2d(fan_in, fan_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, _norm(norm, fan_out), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Expand channels, depthwise convolution, project; with a skip connection if input and output shapes agree."""

    def __init__(self, norm: str, fan_in: int, fan_out: int, expansion: int, stride: int) -> None:
        super().__init__()
        expanded = fan_in * expansion
        expand = [_convolution(norm, fan_in, expanded, 1)] if expansion > 1 else []
        self.body = nn.Sequential(
            *expand,
            _convolution(norm, expanded, expanded, 3, stride, groups=expanded),
            nn.Conv2d(expanded, fan_out, 1, bias=False),
            _norm(norm, fan_out),
        )
        self.skips = stride == 1 and fan_in == fan_out

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        projected: torch.Tensor = self.body(images)
        return images + projected if self.skips else projected


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out")
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.zeros_(module.bias)


def mobilenetv2(seed: int, *, classes: int = 10, channels: int = 3, norm: str = "batch") -> nn.Sequential:
    """MobileNetV2 for 32x32 images.

    ``norm="batch"`` is the published network: its statistics are those of the micro-batch. ``norm="group"`` (groups of
    8 channels) normalises every sample by itself, so the result does not depend on how a batch is split.
    """
    if norm not in ("batch", "group"):
        raise InvalidArgument(f"norm: {norm!r} is unknown; known: batch, group")
    with seeded(seed):
        blocks: list[nn.Module] = [_convolution(norm, channels, STEM, 3)]
        width = STEM
        for expansion, fan_out, count, first_stride in GROUPS:
            for stride in [first_stride] + [1] * (count - 1):
                blocks.append(InvertedResidual(norm, width, fan_out, expansion, stride))
                width = fan_out
        blocks.append(_convolution(norm, width, HEAD, 1))
        blocks.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(HEAD, classes)))
        model = nn.Sequential(*blocks)
        _initialise(model)
    return model
