"""Datasets: a dataset has a length, and gives batches by sample number. Recipes' datasets, samplers and downloads.

May import: native.
"""

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

PUBLIC = ("catalog", "dataset", "mnist", "resident", "sampler", "structured", "tensors", "worker_pool")
"""Modules that other rooms may import."""
