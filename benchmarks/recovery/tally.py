"""Counts the samples of finished steps from a contender's own record, in the same way for all contenders."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from hoop.data.sampler import SampleOrder

BATCH, SAMPLES, EPOCHS = 256, 60_000, int(os.environ.get("HOOP_BENCH_EPOCHS", "4"))
STEPS_AN_EPOCH = SampleOrder(0, SAMPLES).steps(BATCH)
STEPS = EPOCHS * STEPS_AN_EPOCH
Found = TypeVar("Found")


class Tally:
    """How often each sample of each epoch was in a finished step."""

    def __init__(self) -> None:
        self._counts = np.zeros((EPOCHS, SAMPLES), np.int64)

    def feed(self, step: int, samples: Iterable[int]) -> None:
        """Count the samples of one step; steps are numbered from 1."""
        np.add.at(self._counts[(step - 1) // STEPS_AN_EPOCH], np.fromiter(samples, np.int64), 1)

    @property
    def lost(self) -> int:
        """Samples that were in no step of their epoch."""
        return int((self._counts == 0).sum())

    @property
    def repeated(self) -> int:
        """How often a sample was in more than one step of its epoch, summed over all samples."""
        return int(np.maximum(self._counts - 1, 0).sum())


def until(poll: Callable[[], Found | None], timeout: float, description: str) -> Found:
    """Call ``poll`` until it returns a result: a file that another process writes cannot be awaited."""
    deadline = time.monotonic() + timeout
    while not (found := poll()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {timeout:g} s: {description}")
        time.sleep(0.005)
    return found
