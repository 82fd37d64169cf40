"""Reads the samples of a step, micro-batch by micro-batch, on the rank that uses them, into reused buffers."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hoop.data.dataset import Batch, Dataset, Indices
from hoop.data.sampler import shard
from hoop.engine.prefetched_batch import PrefetchedBatch, SampleBuffer
from hoop.engine.stage.provenance import sample_fingerprint


@dataclass(frozen=True)
class Position:
    """The position of a step in the data; all counts begin at 0."""

    epoch: int
    step: int
    """Number of the step within its epoch."""
    done: int
    """Number of steps before this one, over all epochs."""


def microbatch_seed(seed: int, done: int, micro: int) -> int:
    """Random seed of a micro-batch in the step after ``done`` steps."""
    return (seed * 1_000_003 + done) * 65_537 + micro


class DataFeed:
    """One rank's samples of the current step.

    ``begin`` starts a step. ``inputs`` and ``targets`` read a micro-batch when it is first used; ``release`` returns
    its buffers. If a batch is the whole data set and the data has no augmentation, every step reads the same samples:
    then micro-batches are cached, up to ``cache_bytes``. ``prefetch_piece`` begins with the samples of the next step.
    """

    can_prefetch = True
    """Whether ``prefetch_piece`` may be called."""

    def __init__(self, data: Dataset, seed: int, rows: int) -> None:
        """``rows``: samples of a full micro-batch, for which buffers are allocated."""
        self._data = data
        self._seed = seed
        self._rows = rows
        self._free_buffers: list[SampleBuffer] = []
        self._buffers_in_use: dict[int, SampleBuffer] = {}
        self._prefetched: tuple[Position, int, PrefetchedBatch] | None = None
        """The batch that is being prefetched: position of its step, its first micro-batch, its samples."""
        self._batches: dict[int, Batch] = {}
        self._samples: list[Indices] = []
        self._position = Position(0, 0, 0)
        self._cached_samples: Indices | None = None
        """The samples of the step, if they are the whole data set and reading them again gives the same bytes.

        While the trainer passes the same object for each step, the cache stays valid.
        """
        self._cache: dict[tuple[int, int], Batch] = {}
        """Cached batches by (first micro-batch, number of samples)."""
        self.cache_bytes = 0
        """Maximum size of the cache in bytes. More than 0 only for stages that never write to their inputs."""
        self.num_nonempty = 0
        """Number of micro-batches of the step that have samples."""
        self.fingerprints: dict[int, int] = {}
        """Fingerprint of the samples of each micro-batch that was read here: see ``stage/provenance.py``."""
        self.batch_size = 1
        """Number of samples of the step's global batch."""

    def begin(self, position: Position, samples: Indices, num_microbatches: int) -> None:
        """Start a step: split ``samples``, the global batch, into ``num_microbatches``."""
        self._position = position
        if samples is not self._cached_samples:
            self._cache.clear()
            self._cached_samples = samples if len(samples) == len(self._data) and self._data.fixed else None
        self.fingerprints.clear()
        self._samples = [shard(samples, micro, num_microbatches) for micro in range(num_microbatches)]
        self.num_nonempty = min(num_microbatches, len(samples))
        self.batch_size = len(samples)

    def empty(self, micro: int) -> bool:
        return not len(self._samples[micro])

    def seed(self, micro: int) -> int:
        """Random seed of a micro-batch: a function of (seed, step, micro-batch), whatever rank computes it."""
        return microbatch_seed(self._seed, self._position.done, micro)

    def inputs(self, micro: int) -> Tensor:
        return self._batch(micro)[0]

    def targets(self, micro: int) -> Tensor:
        return self._batch(micro)[1]

    def read_batched(self, microbatches: Sequence[int]) -> Batch:
        """Read consecutive micro-batches as one batch. The caller releases it by the number of the first one."""
        key = microbatches[0], sum(map(self.rows, microbatches))
        samples = np.concatenate([self._samples[micro] for micro in microbatches])
        found = self._cache.get(key) or self._read(microbatches[0], samples)
        ends = itertools.accumulate((self.rows(micro) for micro in microbatches), initial=0)
        for micro, (low, high) in zip(microbatches, itertools.pairwise(ends), strict=True):
            self.fingerprints[micro] = sample_fingerprint(samples[low:high])
        return found

    def rows(self, micro: int) -> int:
        return len(self._samples[micro])

    def _batch(self, micro: int) -> Batch:
        found = self._batches.get(micro)
        if found is None:
            found = self._cache.get((micro, self.rows(micro))) or self._read(micro, self._samples[micro])
            self._batches[micro] = found
            self.fingerprints[micro] = sample_fingerprint(self._samples[micro])
        return found

    def _read(self, micro: int, samples: Indices) -> Batch:
        if self._cached_samples is not None and (found := self._read_into_cache(micro, samples)) is not None:
            return found
        if self._prefetched is not None:
            prefetched = self._end_prefetch()
            if prefetched[:2] == (self._position, micro) and np.array_equal(prefetched[2].samples, samples):
                self._buffers_in_use[micro] = prefetched[2].buffer
                return prefetched[2].finish()
            self._free_buffers.append(prefetched[2].buffer)
        self._buffers_in_use[micro] = out = self._take_buffer(len(samples))
        return self._data.batch(samples, epoch=self._position.epoch, seed=self._seed, out=out.batch)

    def _take_buffer(self, rows: int) -> SampleBuffer:
        found = self._free_buffers.pop() if self._free_buffers else None
        if found is None or len(found.batch[1]) < rows:
            found = SampleBuffer(self._data.allocate(max(self._rows, rows)))
        return found

    def prefetch_piece(
        self, position: Position, samples: Indices, microbatches: Sequence[int], num_microbatches: int
    ) -> bool:
        """Load a piece of the first batch of a later step; returns whether there may be more to load.

        ``microbatches``: those that this rank reads as one batch, where all of them are full; else it reads the first
        one alone. If the samples are not wanted, because the next step is another one or this rank begins with other
        micro-batches, the next read discards them. Likewise if they cannot be loaded: then that read raises the error.
        """
        if self._prefetched is None or self._prefetched[0] != position:
            self._begin_prefetch(
                position, samples, [shard(samples, one, num_microbatches) for one in microbatches], microbatches[0]
            )
        if self._prefetched is None or self._prefetched[2].complete:
            return False
        try:
            self._prefetched[2].load_piece()
        except Exception:
            self._free_buffers.append(self._end_prefetch()[2].buffer)
            return False
        return True

    def _begin_prefetch(self, position: Position, samples: Indices, shards: Sequence[Indices], micro: int) -> None:
        if self._prefetched is not None:
            self._free_buffers.append(self._end_prefetch()[2].buffer)
        if not len(shards[0]) or (len(samples) == len(self._data) and self._data.fixed):
            return  # nothing to read, or perhaps cached
        if any(len(one) != self._rows for one in shards):
            shards = shards[:1]
        wanted = np.concatenate(shards)
        batch = PrefetchedBatch(self._data, wanted, position.epoch, self._seed, self._take_buffer(len(wanted)))
        self._prefetched = position, micro, batch

    def _end_prefetch(self) -> tuple[Position, int, PrefetchedBatch]:
        assert self._prefetched is not None, "a batch is prefetched"
        prefetched, self._prefetched = self._prefetched, None
        return prefetched

    def _read_into_cache(self, micro: int, samples: Indices) -> Batch | None:
        """Read a batch and cache it for the next steps; None if it does not fit."""
        found = self._data.allocate(len(samples))
        if sum(one.nbytes for cached in (found, *self._cache.values()) for one in cached) > self.cache_bytes:
            return None
        batch = self._data.batch(samples, epoch=self._position.epoch, seed=self._seed, out=found)
        return self._cache.setdefault((micro, len(samples)), batch)

    def release(self, micro: int) -> None:
        """Return the buffers of a micro-batch that this rank has finished with."""
        self._batches.pop(micro, None)
        if micro in self._buffers_in_use:  # otherwise the batch is in the cache
            self._free_buffers.append(self._buffers_in_use.pop(micro))
