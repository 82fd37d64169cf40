"""Where a thread's batches land: the caller's tensors, checked once and remembered with their NumPy views.

At small batches asking torch for shapes and views would cost as much as loading the samples.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from hoop.data.dataset import Batch, Dataset
from hoop.errors import InvalidArgument

Views = tuple[npt.NDArray[Any], npt.NDArray[Any]]


MOST = 16
"""Pairs of tensors that are remembered: as many as a pipeline has micro-batches in flight, or so."""


class Landing(threading.local):
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
