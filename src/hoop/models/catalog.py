"""The models that Hoop can build by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from hoop.errors import InvalidArgument, NotFound
from hoop.models.gpt import gpt
from hoop.models.vision import lenet, mlp, mobilenetv2, softmax

MODELS: dict[str, Callable[..., nn.Sequential]] = {
    "softmax": softmax,
    "mlp": mlp,
    "lenet": lenet,
    "mobilenetv2": mobilenetv2,
    "gpt": gpt,
}
"""Functions that make a model, by its name; each takes a seed, then options as keyword arguments."""


def build(name: str, seed: int, **options: Any) -> nn.Sequential:
    """Builds a model by name; ``options`` are those of its function in ``MODELS``."""
    if name not in MODELS:
        raise NotFound(f"model: {name!r} is unknown; known: {', '.join(MODELS)}, or give any nn.Module of your own")
    _, *known = inspect.signature(MODELS[name]).parameters
    if unknown := sorted(set(options) - set(known)):
        raise InvalidArgument(f"model {name}: no option {', '.join(unknown)}; it has {', '.join(known)}")
    return MODELS[name](seed, **options)
