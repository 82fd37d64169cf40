"""Early stopping: how many evaluations in a row were not better than the best one before them.

A pure function of the evaluations, which are the same at every rank; so all ranks stop after the same one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hoop.engine.settings import Settings
from hoop.errors import InvalidArgument

LOSS, ACCURACY = "loss", "accuracy"


class EarlyStoppingState(NamedTuple):
    """The best value of the monitored metric, and the evaluations since then."""

    best: float = math.nan
    """Best value of the monitored metric; NaN before the first evaluation."""
    waited: int = 0
    """Number of evaluations since the best one."""


class EarlyStopping:
    """Compares evaluations by the settings ``monitor``, ``monitor_mode``, ``min_delta`` and ``patience``."""

    def __init__(self, settings: Settings) -> None:
        self._patience, self._delta, self.monitor = settings.patience, settings.min_delta, settings.monitor
        self._smaller = (settings.monitor_mode or ("max" if settings.monitor == ACCURACY else "min")) == "min"

    def value(self, loss: float, accuracy: float | None, metrics: dict[str, float]) -> float:
        """The monitored value of an evaluation; raises InvalidArgument if there is no such metric."""
        known = {LOSS: loss, **({} if accuracy is None else {ACCURACY: accuracy}), **metrics}
        if self.monitor not in known:
            if not self._patience:
                return loss
            raise InvalidArgument(
                f"monitor: evaluations have no {self.monitor!r}; they have {', '.join(known)}. Metrics beside the loss "
                "are those that the loss function returns in a dict"
            )
        return known[self.monitor]

    def next(self, state: EarlyStoppingState, value: float) -> EarlyStoppingState:
        """The state after an evaluation with this value."""
        gain = state.best - value if self._smaller else value - state.best
        if math.isnan(state.best) or gain > self._delta:
            return EarlyStoppingState(value, 0)
        return EarlyStoppingState(state.best, state.waited + 1)

    def is_over(self, state: EarlyStoppingState) -> bool:
        """Whether training ends after this evaluation."""
        return bool(self._patience) and state.waited >= self._patience
