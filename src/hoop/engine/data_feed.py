"""The samples of a step, micro-batch by micro-batch, read where they are used into memory that is used again."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from hoop.data.dataset import Batch, Dataset, Indices
from hoop.data.sampler import shard
from hoop.engine.stage.provenance import sample_fingerprint


@dataclass(frozen=True)
class Position:
    """Where in the data a step is."""

    epoch: int
    step: int
    """Of this epoch."""
    done: int
    """Steps before it, of all epochs."""


class DataFeed:
    """One rank's view of the samples of a step."""

    def __init__(self, data: Dataset, seed: int, rows: int) -> None:
        self._data = data
        self._seed = seed
        self._rows = rows
        self._spare: list[Batch] = []
        self._out: dict[int, Batch] = {}
        self._batches: dict[int, Batch] = {}
        self._samples: list[Indices] = []
        self._position = Position(0, 0, 0)
        self._whole: Indices | None = None
        """The samples of the step, where those are all there are and look as they did: what was read is kept."""
        self._kept: dict[tuple[int, int], Batch] = {}
        """By the first micro-batch and the number of samples."""
        self.room = 0
        """Bytes for what is kept. Only for stages that never write to their inputs."""
        self.full = 0
        """How many micro-batches of the step have samples."""
        self.prints: dict[int, int] = {}
        """Of the micro-batches of the step that were read here, what samples they are: see ``evidence``."""
        self.batch_size = 1
        """How many samples the global batch of the step has."""

    def begin(self, position: Position, samples: Indices, micros: int) -> None:
        """The samples of a step, cut into micro-batches."""
        self._position = position
        if samples is not self._whole:
            self._kept.clear()
            self._whole = samples if len(samples) == len(self._data) and self._data.fixed else None
        self.prints.clear()
        self._samples = [shard(samples, micro, micros) for micro in range(micros)]
        self.full = min(micros, len(samples))
        self.batch_size = len(samples)

    def empty(self, micro: int) -> bool:
        return not len(self._samples[micro])

    def seed(self, micro: int) -> int:
        """What a micro-batch draws depends on (seed, step, micro-batch), not on the device."""
        return (self._seed * 1_000_003 + self._position.done) * 65_537 + micro

    def inputs(self, micro: int) -> Tensor:
        return self._batch(micro)[0]

    def targets(self, micro: int) -> Tensor:
        return self._batch(micro)[1]

    def joint(self, micros: Sequence[int]) -> Batch:
        """Consecutive micro-batches as one; to be released under the first one's number."""
        key = micros[0], sum(map(self.rows, micros))
        samples = np.concatenate([self._samples[micro] for micro in micros])
        found = self._kept.get(key) or self._read(micros[0], samples)
        ends = itertools.accumulate((self.rows(micro) for micro in micros), initial=0)
        for micro, (low, high) in zip(micros, itertools.pairwise(ends), strict=True):
            self.prints[micro] = sample_fingerprint(samples[low:high])
        return found

    def rows(self, micro: int) -> int:
        return len(self._samples[micro])

    def _batch(self, micro: int) -> Batch:
        found = self._batches.get(micro)
        if found is None:
            found = self._kept.get((micro, self.rows(micro))) or self._read(micro, self._samples[micro])
            self._batches[micro] = found
            self.prints[micro] = sample_fingerprint(self._samples[micro])
        return found

    def _read(self, micro: int, samples: Indices) -> Batch:
        if self._whole is not None and (found := self._keep(micro, samples)) is not None:
            return found
        out = self._spare.pop() if self._spare else None
        if out is None or len(out[1]) < len(samples):
            out = self._data.allocate(max(self._rows, len(samples)))
        self._out[micro] = out
        return self._data.batch(samples, epoch=self._position.epoch, seed=self._seed, out=out)

    def _keep(self, micro: int, samples: Indices) -> Batch | None:
        """Reads a batch to be there at the next step too; None where there is no room."""
        found = self._data.allocate(len(samples))
        if sum(one.nbytes for batch in (found, *self._kept.values()) for one in batch) > self.room:
            return None
        kept = self._data.batch(samples, epoch=self._position.epoch, seed=self._seed, out=found)
        return self._kept.setdefault((micro, len(samples)), kept)

    def release(self, micro: int) -> None:
        """Nobody here needs this micro-batch any more."""
        self._batches.pop(micro, None)
        if micro in self._out:  # else it is kept
            self._spare.append(self._out.pop(micro))
