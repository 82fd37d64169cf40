"""Datasets: a dataset has a length, and gives batches by sample number. Recipes' datasets, samplers and downloads.

May import: native.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hoop.data.catalog import DATASETS, load
    from hoop.data.dataset import Batch, Dataset, Splits
    from hoop.data.images import Augment, ImageData
    from hoop.data.sampler import SampleOrder, shard
    from hoop.data.tensors import MapData, TensorData
    from hoop.data.text import TextData

__all__ = [
    "DATASETS",
    "Augment",
    "Batch",
    "Dataset",
    "ImageData",
    "MapData",
    "SampleOrder",
    "Splits",
    "TensorData",
    "TextData",
    "load",
    "shard",
]

PUBLIC = ("catalog", "dataset", "mnist", "resident", "sampler", "structured", "tensors", "user_data", "worker_pool")
"""Modules that other rooms may import."""

# Loaded when first used: the order of the samples is NumPy's alone, and an audit of it needs no PyTorch.
_MODULES = {
    "DATASETS": "catalog",
    "Augment": "images",
    "Batch": "dataset",
    "Dataset": "dataset",
    "ImageData": "images",
    "MapData": "tensors",
    "SampleOrder": "sampler",
    "Splits": "dataset",
    "TensorData": "tensors",
    "TextData": "text",
    "load": "catalog",
    "shard": "sampler",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'hoop.data' has no attribute {name!r}")
    return getattr(importlib.import_module(f"hoop.data.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
