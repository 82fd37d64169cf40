"""The datasets that Hoop can load by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hoop.data.cifar import cifar10
from hoop.data.dataset import Splits
from hoop.data.mnist import fashion_mnist, mnist
from hoop.data.text import text, tinyshakespeare
from hoop.errors import InvalidArgument, NotFound

DATASETS: dict[str, Callable[..., Splits]] = {
    "mnist": mnist,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
    "tinyshakespeare": tinyshakespeare,
    "text": text,
}
"""Loaders of datasets by name; a loader takes its options as keyword arguments."""


def load(name: str, **options: Any) -> Splits:
    """The train and test splits of a dataset by name; ``options`` are those of its loader."""
    if name not in DATASETS:
        raise NotFound(f"dataset: {name!r} is unknown; known: {', '.join(DATASETS)}, or give tensors of your own")
    known = inspect.signature(DATASETS[name]).parameters
    if unknown := sorted(set(options) - set(known)):
        raise InvalidArgument(f"dataset {name}: no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}")
    if missing := [
        field for field, option in known.items() if option.default is inspect.Parameter.empty and field not in options
    ]:
        raise InvalidArgument(f"dataset {name}: it needs the option {', '.join(missing)}")
    return DATASETS[name](**options)
