"""What a dataset is: a length, a name, a checksum, and batches by sample number.

Where a thread's batches land: the caller's tensors, checked once and remembered with their NumPy views.

At small batches asking torch for shapes and views would cost as much as loading the samples.
"""

from __future__ import annotations

import hashlib
import threading
from typing import Any, NamedTuple, Protocol, TypeVar

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


Views = tuple[npt.NDArray[Any], npt.NDArray[Any]]


MOST = 16
"""Pairs of tensors that are remembered: as many as a pipeline has micro-batches in flight, or so."""


class BatchBuffers(threading.local):
    """The tensors that a thread's batches went to, and room for the bytes they were made of."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], tuple[Batch, Views]] = {}
        self._bytes = np.empty(0, np.uint8)

    def rows(self, out: Batch | None, rows: int, dataset: Dataset) -> tuple[Batch, Views]:
        """The first rows of ``out`` (or of fresh tensors), as tensors to return and as arrays to write to."""
        if out is None:
            inputs, targets = dataset.allocate(rows)
            return (inputs, targets), (inputs.numpy(), targets.numpy())
        # Identities are safe as keys: what is remembered is kept, so no other tensor can have them.
        known = self._known.get((id(out[0]), id(out[1])))
        views = known[1] if known else self._remember(out, rows, dataset)
        inputs_view, targets_view = views
        if rows == len(inputs_view) == len(targets_view):
            return out, views
        if rows > min(len(inputs_view), len(targets_view)):
            _check(out, rows, dataset)
        return (out[0][:rows], out[1][:rows]), (inputs_view[:rows], targets_view[:rows])

    def _remember(self, out: Batch, rows: int, dataset: Dataset) -> Views:
        _check(out, rows, dataset)
        if len(self._known) == MOST:
            del self._known[next(iter(self._known))]
        views = out[0].numpy(), out[1].numpy()
        self._known[id(out[0]), id(out[1])] = out, views
        return views

    def room(self, rows: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """Memory for the bytes of a batch, kept for the next one."""
        if len(self._bytes) < rows or self._bytes.shape[1:] != shape:
            self._bytes = np.empty((rows, *shape), np.uint8)
        return self._bytes[:rows]


def rows_of(out: Batch | None, rows: int, dataset: Dataset) -> Batch:
    """The first rows of ``out``, if it fits what the dataset writes; fresh tensors if there is none."""
    if out is None:
        return dataset.allocate(rows)
    _check(out, rows, dataset)
    return out[0][:rows], out[1][:rows]


def _check(out: Batch, rows: int, dataset: Dataset) -> None:
    for field, given, like in zip(("inputs", "targets"), out, dataset.allocate(0), strict=True):
        fits = given.shape[1:] == like.shape[1:] and len(given) >= rows and given.dtype == like.dtype
        if not fits or given.device.type != "cpu" or not given.is_contiguous():
            raise InvalidArgument(
                f"out: {field} is {given.dtype} {list(given.shape)} on {given.device}; {dataset.name} writes "
                f"contiguous {like.dtype} {[rows, *like.shape[1:]]} on the CPU, as allocate({rows}) makes"
            )
