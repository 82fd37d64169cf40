"""Image classifiers: softmax regression, a multi-layer perceptron, LeNet and MobileNetV2."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import nn

from hoop.errors import InvalidArgument
from hoop.models.seeding import seeded


def softmax(seed: int, *, inputs: int = 784, classes: int = 10) -> nn.Sequential:
    """Softmax regression: one linear layer on the pixels. ``inputs`` is channels x height x width, of any size."""
    with seeded(seed):
        return nn.Sequential(nn.Flatten(), nn.Linear(inputs, classes))


def mlp(seed: int, *, widths: Sequence[int] = (784, 128, 64, 10)) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them, one block per layer; 784-128-64-10 has 109 386 parameters.

    The model contains only Flatten, Linear and ReLU, so that the engine can recognise it by type and run it without
    autograd: at small batches torch's dispatch costs as much as the arithmetic.
    """
    if len(widths) < 2 or min(widths) < 1:
        raise InvalidArgument(f"widths: {list(widths)} is not two or more sizes of at least 1")
    with seeded(seed):
        linears = [nn.Linear(fan_in, fan_out) for fan_in, fan_out in itertools.pairwise(widths)]
    *hidden, last = linears
    if not hidden:
        return nn.Sequential(nn.Flatten(), last)
    first = nn.Sequential(nn.Flatten(), hidden[0], nn.ReLU())
    return nn.Sequential(first, *(nn.Sequential(linear, nn.ReLU()) for linear in hidden[1:]), last)


def lenet(seed: int, *, channels: int = 1, classes: int = 10) -> nn.Sequential:
    """LeNet-5 with ReLU and max pooling: two convolutions, then linear layers 400-120-84-classes; 61 706 parameters.

    The first convolution pads 28x28 images by two, to the 32x32 that LeNet-5 expects.
    """
    with seeded(seed):
        return nn.Sequential(
            nn.Sequential(nn.Conv2d(channels, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
            nn.Sequential(nn.Flatten(), nn.Linear(16 * 5 * 5, 120), nn.ReLU()),
            nn.Sequential(nn.Linear(120, 84), nn.ReLU()),
            nn.Linear(84, classes),
        )


MOBILENET_GROUPS = (
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
    """MobileNetV2 for 32x32 images: about 2.2 million parameters in 20 blocks.

    Unlike the network for 224x224 (Sandler et al., 2018), the first convolution and the second group of blocks keep
    their resolution: 32x32 shrinks to 4x4 before the pooling, and not to 1x1.

    ``norm="batch"`` is the published network: its statistics are those of the micro-batch. ``norm="group"`` (groups of
    8 channels) normalises every sample by itself, so the result does not depend on how a batch is split.
    """
    if norm not in ("batch", "group"):
        raise InvalidArgument(f"norm: {norm!r} is unknown; known: batch, group")
    with seeded(seed):
        blocks: list[nn.Module] = [_convolution(norm, channels, STEM, 3)]
        width = STEM
        for expansion, fan_out, count, first_stride in MOBILENET_GROUPS:
            for stride in [first_stride] + [1] * (count - 1):
                blocks.append(InvertedResidual(norm, width, fan_out, expansion, stride))
                width = fan_out
        blocks.append(_convolution(norm, width, HEAD, 1))
        blocks.append(nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(HEAD, classes)))
        model = nn.Sequential(*blocks)
        _initialise(model)
    return model
