"""Every dataset that Hoop can find by name."""

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
"""Name to loader; each takes options by name."""


def load(name: str, **options: Any) -> Splits:
    """A dataset by name, as its two splits."""
    if name not in DATASETS:
        raise NotFound(
            f"dataset: {name!r} is unknown; known: {', '.join(DATASETS)}, or give tensors of your own"
        )
    known = inspect.signature(DATASETS[name]).parameters
    if unknown := sorted(set(options) - set(known)):
        raise InvalidArgument(
            f"dataset {name}: no option {', '.join(unknown)}; it has {', '.join(known) or 'none'}"
        )
    if lacking := [
        field
        for field, option in known.items()
        if option.default is inspect.Parameter.empty and field not in options
    ]:
        raise InvalidArgument(f"dataset {name}: it needs the option {', '.join(lacking)}")
    return DATASETS[name](**options)
