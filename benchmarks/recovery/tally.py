"""Which samples went into finished steps, by a contender's own record: the same count for all of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TypeVar

import numpy as np

from hoop.data.sampler import SampleOrder

BATCH, SAMPLES, EPOCHS = 256, 60_000, 4
STEPS_AN_EPOCH = SampleOrder(0, SAMPLES).steps(BATCH)
STEPS = EPOCHS * STEPS_AN_EPOCH
Found = TypeVar("Found")


class Tally:
    """How often each sample of each epoch was in a step that was finished."""

    def __init__(self) -> None:
        self._counts = np.zeros((EPOCHS, SAMPLES), np.int64)

    def feed(self, step: int, samples: Iterable[int]) -> None:
        """Into one step, counted from 1."""
        np.add.at(self._counts[(step - 1) // STEPS_AN_EPOCH], np.fromiter(samples, np.int64), 1)

    @property
    def lost(self) -> int:
        """Samples that were in no step of an epoch."""
        return int((self._counts == 0).sum())

    @property
    def repeated(self) -> int:
        """Times that a sample was in a step once more than it should."""
        return int(np.maximum(self._counts - 1, 0).sum())


def until(happened: Callable[[], Found | None], patience: float, what: str) -> Found:
    """What came of it; a file that another process writes makes no event that can be awaited."""
    deadline = time.monotonic() + patience
    while not (found := happened()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {patience:g} s: {what}")
        time.sleep(0.005)
    return found
