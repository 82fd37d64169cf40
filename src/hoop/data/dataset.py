"""The ``Dataset`` protocol (name, length, checksum, batches by sample index), and helpers for implementing it.

``BatchBuffers`` caches the checks and NumPy views of the caller's output tensors: for small batches asking torch for
shapes and views would cost as much as loading the samples.
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
"""Inputs and targets of a batch, one row per sample."""

Indices = npt.NDArray[np.int64]
"""Numbers of samples in the dataset."""

_INT64 = np.dtype(np.int64)


class Dataset(Protocol):
    """Samples by index. A sample is a function of (seed, epoch, index) and of nothing else."""

    @property
    def name(self) -> str:
        """Name for users, e.g. ``mnist/train``."""

    @property
    def checksum(self) -> str:
        """sha256 of the content: devices with equal checksums have equal data."""

    @property
    def fixed(self) -> bool:
        """Whether a sample is the same in every epoch (no augmentation)."""

    def __len__(self) -> int: ...

    def allocate(self, rows: int) -> Batch:
        """Uninitialised tensors for a batch of ``rows`` samples."""

    def batch(self, indices: Indices, *, epoch: int, seed: int, out: Batch | None = None) -> Batch:
        """The samples in the given order, written into the first rows of ``out`` if given.

        With the same ``out`` at every step nothing is allocated; a shorter last batch is a view of it.
        """


class Splits(NamedTuple):
    """Training and test data. Without test data ``test`` is the training data again.

    Each is a ``Dataset``, or a ``structured.StructuredDataset``, whose batches have any structure.
    """

    train: Any
    test: Any

    @property
    def evaluated_split(self) -> str:
        """The split that evaluations use: ``test``, or ``train`` if both splits have the same samples."""
        same = self.test is self.train or (
            len(self.test) == len(self.train) and self.test.checksum == self.train.checksum
        )
        return "train" if same else "test"


def fingerprint(data: Splits) -> str:
    """16 hex digits; equal for splits with equal names, sizes and contents."""
    lines = [f"{one.name} {len(one)} {one.checksum}" for one in data]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def describe(data: Splits) -> str:
    """Names and sizes of both splits, for users."""
    return " and ".join(f"{one.name} of {len(one)} samples" for one in data)


def check_indices(indices: Indices, dataset: Dataset) -> Indices:
    """Returns the indices if they are valid for the dataset; raises otherwise."""
    if not isinstance(indices, np.ndarray) or indices.ndim != 1 or indices.dtype != _INT64:
        raise InvalidArgument("indices: not a one-dimensional array of int64; use SampleOrder to make them")
    # As unsigned integers negative indices exceed any length, so one pass finds both kinds of error.
    if len(indices) and indices.view(np.uint64).max() >= len(dataset):
        raise OutOfRange(
            f"indices: {dataset.name} has samples 0..{len(dataset) - 1}, not {indices.min()}..{indices.max()}"
        )
    return indices


def sha256_of(*parts: npt.NDArray[np.generic] | torch.Tensor) -> str:
    """sha256 over the dtypes, shapes and bytes of arrays and tensors."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(f"{part.dtype}{tuple(part.shape)}".encode())
        if isinstance(part, torch.Tensor):  # NumPy lacks some of torch's dtypes, so take the bytes
            part = part.detach().contiguous().flatten().view(torch.uint8).numpy()
        digest.update(np.ascontiguousarray(part).view(np.uint8).data)
    return digest.hexdigest()


def read_only(array: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
    """The array, contiguous and read-only: forked processes share its pages as long as no process writes to them."""
    array = np.ascontiguousarray(array).view()
    array.flags.writeable = False
    return array


Views = tuple[npt.NDArray[Any], npt.NDArray[Any]]


MAX_CACHED = 16
"""Maximum number of cached pairs of output tensors: about as many as a pipeline has micro-batches in flight."""


class BatchBuffers(threading.local):
    """Per thread: a cache of checked output tensors with their NumPy views, and a scratch buffer for raw bytes."""

    def __init__(self) -> None:
        self._cache: dict[tuple[int, int], tuple[Batch, Views]] = {}
        self._scratch = np.empty(0, np.uint8)

    def rows(self, out: Batch | None, rows: int, dataset: Dataset) -> tuple[Batch, Views]:
        """The first rows of ``out`` (or of new tensors): as tensors to return, and as arrays to write to."""
        if out is None:
            inputs, targets = dataset.allocate(rows)
            return (inputs, targets), (inputs.numpy(), targets.numpy())
        # id() is safe as a key: the cache keeps the tensors alive, so no other tensor can have the same id.
        cached = self._cache.get((id(out[0]), id(out[1])))
        views = cached[1] if cached else self._add(out, rows, dataset)
        inputs_view, targets_view = views
        if rows == len(inputs_view) == len(targets_view):
            return out, views
        if rows > min(len(inputs_view), len(targets_view)):
            _check(out, rows, dataset)
        return (out[0][:rows], out[1][:rows]), (inputs_view[:rows], targets_view[:rows])

    def _add(self, out: Batch, rows: int, dataset: Dataset) -> Views:
        _check(out, rows, dataset)
        if len(self._cache) == MAX_CACHED:
            del self._cache[next(iter(self._cache))]
        views = out[0].numpy(), out[1].numpy()
        self._cache[id(out[0]), id(out[1])] = out, views
        return views

    def scratch(self, rows: int, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
        """A reusable buffer for the raw bytes of a batch."""
        if len(self._scratch) < rows or self._scratch.shape[1:] != shape:
            self._scratch = np.empty((rows, *shape), np.uint8)
        return self._scratch[:rows]


def output_rows(out: Batch | None, rows: int, dataset: Dataset) -> Batch:
    """The first rows of ``out``, after checking that it fits the dataset; new tensors if ``out`` is None."""
    if out is None:
        return dataset.allocate(rows)
    _check(out, rows, dataset)
    return out[0][:rows], out[1][:rows]


def _check(out: Batch, rows: int, dataset: Dataset) -> None:
    for field, given, expected in zip(("inputs", "targets"), out, dataset.allocate(0), strict=True):
        fits = given.shape[1:] == expected.shape[1:] and len(given) >= rows and given.dtype == expected.dtype
        if not fits or given.device.type != "cpu" or not given.is_contiguous():
            raise InvalidArgument(
                f"out: {field} is {given.dtype} {list(given.shape)} on {given.device}; {dataset.name} writes "
                f"contiguous {expected.dtype} {[rows, *expected.shape[1:]]} on the CPU, as allocate({rows}) makes"
            )
