"""The batches of a step in custom training, micro-batch by micro-batch; worker processes may prefetch them."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from hoop.data.dataset import Indices
from hoop.data.sampler import shard
from hoop.data.structured import StructuredDataset
from hoop.data.worker_pool import WorkerPool
from hoop.engine.data_feed import DataFeed, Position
from hoop.engine.job import LOADED, import_path
from hoop.engine.stage.provenance import sample_fingerprint
from hoop.engine.step_schedule import StepWork

log = logging.getLogger("hoop.engine")
LOADERS: dict[str, WorkerPool] = {}
"""Worker pools that this device has forked for a job before it had threads, by the job's name."""


def fork_loaders(job: str) -> None:
    """Forks the workers of a job's dataset, if it wants any. Called in a device's process before it has threads."""
    name = import_path(job)
    loaded = LOADED.get(name)
    data = loaded.data().train if loaded is not None else None
    if isinstance(data, StructuredDataset) and data.num_workers:
        LOADERS[name] = WorkerPool(data, data.num_workers)


class StructuredFeed(DataFeed):
    """One rank's batches of the current step, as the dataset's collate function makes them."""

    can_prefetch = False
    """False: worker processes prefetch (``prefetch``); a user's samples may take long, and other ranks would wait."""

    def __init__(self, data: StructuredDataset, seed: int, timeout_s: float, job: str = "") -> None:
        """``job``: its name, by which ``fork_loaders`` has forked workers. Without workers this thread loads."""
        super().__init__(data, seed, 0)  # type: ignore[arg-type]  # only ``load`` is called
        self._structured, self._timeout_s = data, timeout_s
        self._pool = LOADERS.pop(job, None)
        if data.num_workers and self._pool is None:
            log.warning("num_workers: %d has no effect on this device; it loads samples by itself", data.num_workers)

    def begin(self, position: Position, samples: Indices, num_microbatches: int) -> None:
        self._position = position
        self.fingerprints.clear()
        self._samples = [shard(samples, micro, num_microbatches) for micro in range(num_microbatches)]
        self.num_nonempty = min(num_microbatches, len(samples))
        self.batch_size = len(samples)

    def prefetch(self, works: Sequence[StepWork], microbatches: Sequence[int], num_microbatches: int) -> None:
        """Lets workers load these micro-batches of these steps, in order. Without workers it does nothing."""
        if self._pool is None:
            return
        self._pool.forget_except({(work.position.done, micro) for work in works for micro in microbatches})
        for work in works:
            for micro in microbatches:
                samples = shard(work.samples, micro, num_microbatches)
                if len(samples):
                    self._pool.request((work.position.done, micro), samples.copy(), work.position.epoch, self._seed)

    def batch(self, micro: int) -> Any:
        """The batch of a micro-batch that is not empty."""
        samples = self._samples[micro]
        self.fingerprints[micro] = sample_fingerprint(samples)
        position = self._position
        if self._pool is not None:
            key = (position.done, micro)
            self._pool.request(key, samples.copy(), position.epoch, self._seed)
            return self._pool.result(key, time.monotonic() + self._timeout_s)
        return self._structured.load(samples, epoch=position.epoch, seed=self._seed)

    def release(self, micro: int) -> None:
        """Nothing to return: a batch has memory of its own."""

    def close(self) -> None:
        """Ends the workers."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
