"""What a dataset is: a length, a name, a checksum, and batches by sample number."""

from __future__ import annotations

import hashlib
from typing import NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hoop.errors import InvalidArgument, OutOfRange

Scalar = TypeVar("Scalar", bound=np.generic)

Batch = tuple[torch.Tensor, torch.Tensor]
"""Inputs and targets, a row a sample."""

Indices = npt.NDArray[np.int64]
"""Sample numbers."""

_INT64 = np.dtype(np.int64)


class Dataset(Protocol):
    """Samples by number. What a sample looks like depends on (seed, epoch, its number), on nothing else."""

    @property
    def name(self) -> str:
        """What people call it, e.g. ``mnist/train``."""

    @property
    def checksum(self) -> str:
        """The sha256 of the content: devices that report the same one hold the same data."""

    @property
    def fixed(self) -> bool:
        """Whether a sample looks the same in every epoch."""

    def __len__(self) -> int: ...

    def allocate(self, rows: int) -> Batch:
        """Tensors that a batch of so many samples fits into."""

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        """These samples, in this order; in the first rows of ``out`` where that is given.

        With the same ``out`` at every step no memory is allocated; the last, shorter batch is a view of it.
        """


class Splits(NamedTuple):
    """What a model learns from, and what it is measured on: where there is no test data, the training data again."""

    train: Dataset
    test: Dataset

    @property
    def evaluated(self) -> str:
        """Which of the two evaluations are on: ``test``, or ``train`` where both have the same samples."""
        same = self.test is self.train or (
            len(self.test) == len(self.train) and self.test.checksum == self.train.checksum
        )
        return "train" if same else "test"


def fingerprint(data: Splits) -> str:
    """16 digits that are the same where names, sizes and contents are."""
    told = [f"{one.name} {len(one)} {one.checksum}" for one in data]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()[:16]


def described(data: Splits) -> str:
    """Which data it is, in words."""
    return " and ".join(f"{one.name} of {len(one)} samples" for one in data)


def checked(indices: Indices, dataset: Dataset) -> Indices:
    """The sample numbers, if the dataset has them all."""
    if not isinstance(indices, np.ndarray) or indices.ndim != 1 or indices.dtype != _INT64:
        raise InvalidArgument("indices: not a one-dimensional array of int64; use Order to make them")
    # Seen as unsigned a negative number is larger than any length: one pass finds both kinds of mistake.
    if len(indices) and indices.view(np.uint64).max() >= len(dataset):
        raise OutOfRange(
            f"indices: {dataset.name} has samples 0..{len(dataset) - 1}, not {indices.min()}..{indices.max()}"
        )
    return indices


def sha256_of(*parts: npt.NDArray[np.generic] | torch.Tensor) -> str:
    """One checksum of arrays and tensors: types, shapes and bytes."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
        if isinstance(part, torch.Tensor):  # not every type of torch's is one of NumPy's
            part = part.detach().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(np.ascontiguousarray(part).view(np.uint8).data)
    return digest.hexdigest()


def frozen(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """The array, contiguous and read-only: forked processes share its pages for as long as nobody writes."""
    array = np.ascontiguousarray(array).view()
    array.flags.writeable = False
    return array
