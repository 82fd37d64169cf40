"""The steps of a run: their number, samples and learning rates, from the settings and the number of samples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hoop.data.dataset import Indices
from hoop.data.sampler import SampleOrder
from hoop.engine.data_feed import Position
from hoop.engine.settings import Settings
from hoop.errors import InvalidArgument


@dataclass(frozen=True)
class StepWork:
    """A step to run: its position in the data, its samples (the global batch), its learning rate."""

    position: Position
    samples: Indices
    rate: float


class StepSchedule:
    """All steps of a run: their number, samples and learning rates, and where epochs end.

    ``done`` is a number of steps: that many are finished, and the next step has that index.
    """

    def __init__(self, settings: Settings, samples: int) -> None:
        """``samples``: number of training samples."""
        self._settings = settings
        self._order = SampleOrder(settings.seed, samples)
        self._in_order = np.arange(samples, dtype=np.int64)
        """Numbers of the samples in the order of the dataset, for ``shuffle=False``."""
        self.samples = samples
        self.steps_per_epoch = self._order.steps(settings.batch_size)
        if settings.drop_last and samples % settings.batch_size:
            self.steps_per_epoch -= 1
        if not self.steps_per_epoch:
            raise InvalidArgument(
                f"drop_last: {samples} samples are less than one batch of {settings.batch_size}, so none is left; use "
                "a smaller batch_size, or drop_last=False"
            )
        self._steps = settings.epochs * self.steps_per_epoch
        """Number of steps of all epochs, which the learning-rate schedule spans."""
        self.total_steps = min(self._steps, settings.max_steps or self._steps)

    def rate(self, done: int) -> float:
        """Learning rate of the step after ``done`` steps; ``optimizer_settings.py`` computes it."""
        return self._settings.optimizer.rate(done, self._steps)

    def next_steps(self, done: int, stride: int) -> list[StepWork]:
        """The steps until ranks synchronize again, at most ``stride``.

        They end at multiples of ``stride`` within an epoch and at the epoch's end: at the same steps, wherever a run
        was resumed.
        """
        epoch, step = divmod(done, self.steps_per_epoch)
        end = min((step // stride + 1) * stride, self.steps_per_epoch, step + self.total_steps - done)
        works = []
        for one in range(step, end):
            number = done + one - step
            works.append(StepWork(Position(epoch, one, number), self._samples(epoch, one), self.rate(number)))
        return works

    def next_in_epoch(self, done: int) -> StepWork | None:
        """The step after ``done`` steps, if it belongs to the same epoch as the one before it; else None."""
        if done >= self.total_steps or done % self.steps_per_epoch == 0:
            return None
        return self.next_steps(done, 1)[0]

    def _samples(self, epoch: int, step: int) -> Indices:
        size = self._settings.batch_size
        if self._settings.shuffle:
            return self._order.indices(epoch, step, size)
        return self._in_order[step * size : (step + 1) * size]

    def is_epoch_end(self, done: int) -> bool:
        """True at the end of an epoch, and at the end of the run."""
        return done % self.steps_per_epoch == 0 or done == self.total_steps

    def last_epoch_end(self, done: int) -> int:
        """Last epoch boundary that must have been processed after ``done`` steps."""
        return max(0, (done - 1) // self.steps_per_epoch * self.steps_per_epoch)

    def epoch_number(self, done: int) -> int:
        """The epoch that ends at ``done``, counted from 1."""
        return -(-done // self.steps_per_epoch)
