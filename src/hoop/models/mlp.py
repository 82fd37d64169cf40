"""The multi-layer perceptron 784-128-64-10: 109 386 parameters, 438 KB of gradients."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from torch import nn

from hoop.errors import InvalidArgument
from hoop.models.seeding import seeded


def mlp(seed: int, *, widths: Sequence[int] = (784, 128, 64, 10)) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them, one block per layer.

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
