"""Prefetches samples of the next step while a rank waits for the other ranks' gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hoop.engine.data_feed import DataFeed
from hoop.engine.profiler import now
from hoop.engine.step_schedule import StepWork


class Prefetcher:
    """Loads the first batch of the next step, piece by piece. ``PlanExecutor`` passes it to the all-reduce."""

    def __init__(self, feed: DataFeed, next_step: Callable[[int], StepWork | None]) -> None:
        """``next_step(done)``: the step after ``done`` steps; None: nothing is to be loaded for it."""
        self._feed, self._next_step = feed, next_step
        self._work: StepWork | None = None
        self._done = self._num_microbatches = 0
        self._microbatches: Sequence[int] = ()
        self.seconds = 0.0
        """Seconds spent on prefetching during the current step."""

    def begin(self, done: int, microbatches: Sequence[int], num_microbatches: int) -> None:
        """Called when this rank starts to wait for the gradient sum of a step.

        ``done``: steps done once this one ends. ``microbatches``: those to load first for the next step.
        """
        self._done, self._microbatches, self._num_microbatches = done, microbatches, num_microbatches
        self._work, self.seconds = None, 0.0

    def __call__(self) -> bool:
        """Load a piece; False if nothing is left to load."""
        if not self._microbatches:
            return False
        started = now()
        if self._work is None:
            self._work = self._next_step(self._done)
        work = self._work
        more = work is not None and self._feed.prefetch_piece(
            work.position, work.samples, self._microbatches, self._num_microbatches
        )
        if not more:
            self._microbatches = ()
        self.seconds += now() - started
        return more
