"""A batch of the next step, loaded piece by piece while its rank waits for the other ranks' gradients.

    publish ─ wait ············ fold ─ wait ····
    publish ─ load load wait ·· fold ─ load wait     what is loaded here, the next step need not load

A rank that waits checks between pieces whether the others have arrived, so they wait for one piece at most.
"""

from __future__ import annotations

import itertools

from hoop.data.dataset import Batch, Dataset, Indices

PIECES = 4
"""Maximum number of pieces of a batch. More of them delay other ranks less, but a small piece costs more per sample."""
MIN_ROWS = 16
"""Minimum number of samples of a piece."""


class SampleBuffer:
    """Memory for a batch, and views of ranges of its rows. A dataset caches what it knows of an output by identity."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._views: dict[tuple[int, int], Batch] = {}

    def rows(self, low: int, high: int) -> Batch:
        """The rows ``[low, high)``; the same tensors each time."""
        if (low, high) == (0, len(self.batch[1])):
            return self.batch
        found = self._views.get((low, high))
        if found is None:
            found = self._views[low, high] = self.batch[0][low:high], self.batch[1][low:high]
        return found


class PrefetchedBatch:
    """The samples of one batch at one position, of which some are loaded."""

    def __init__(self, data: Dataset, samples: Indices, epoch: int, seed: int, buffer: SampleBuffer) -> None:
        self.samples, self.buffer = samples, buffer
        self._data, self._epoch, self._seed = data, epoch, seed
        rows = max(MIN_ROWS, -(-len(samples) // PIECES))
        self._bounds = list(itertools.pairwise([*range(0, len(samples), rows), len(samples)]))
        self._loaded = 0

    @property
    def complete(self) -> bool:
        return self._loaded == len(self._bounds)

    def load_piece(self) -> None:
        """Load the next piece."""
        self._load(*self._bounds[self._loaded])
        self._loaded += 1

    def finish(self) -> Batch:
        """Load what is missing, and return the batch."""
        if not self.complete:
            self._load(self._bounds[self._loaded][0], len(self.samples))
            self._loaded = len(self._bounds)
        return self.buffer.rows(0, len(self.samples))

    def _load(self, low: int, high: int) -> None:
        self._data.batch(self.samples[low:high], epoch=self._epoch, seed=self._seed, out=self.buffer.rows(low, high))
