"""Datasets: found by name, verified by checksum, sampled in an order that depends on the seed alone.

A ``Dataset`` has a length and turns sample indices into tensors; ``SampleOrder`` gives the samples of each step;
``load`` returns the train and test splits of a dataset by name. This package does not depend on devices or ranks.
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
