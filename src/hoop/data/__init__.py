"""Data that is loaded where it is used: named, checksummed, in an order that depends on the seed alone.

A ``Dataset`` has a length and turns sample numbers into tensors; ``SampleOrder`` says which samples a step takes;
``load`` finds a dataset by name, as its two splits. Nothing here knows of devices.
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
