"""A callback that only observes breaks no training; an exception of another one ends it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import hoop
from hoop import job_events as ev
from hoop.job_events import Observed
from hoop.runs.callbacks import CallbackCaller, RunControl

STEPS = Observed(ev.Steps(first=0, loss=[1.0, 0.5], seconds=[0.1, 0.1], rate=0.1, fed=[None, None]))


class Gone:
    """A server of metrics that cannot be reached."""

    calls = 0

    def log(self, values: Mapping[str, float], step: int) -> None:
        self.calls += 1
        raise ConnectionError("no route to the server")


class Failing(hoop.Callback):
    def on_step(self, run: RunControl, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        raise ValueError("a mistake")


class Noting(hoop.Callback):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_step(self, run: RunControl, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        self.seen.append(step)

    def on_exception(self, run: RunControl, exception: BaseException) -> None:
        self.seen.append(exception)


def test_a_logger_that_fails_is_a_warning_and_is_not_called_again() -> None:
    gone, noting = Gone(), Noting()
    caller = CallbackCaller([hoop.WandbLogger(gone), noting], RunControl(lambda: None, {}))
    with pytest.warns(UserWarning, match="WandbLogger failed, and is not called any more.*no route to the server"):
        caller.on_observed(STEPS)
    caller.on_observed(STEPS)
    assert (gone.calls, noting.seen) == (1, [1, 2, 1, 2])


def test_an_exception_of_another_callback_is_raised() -> None:
    with pytest.raises(ValueError, match="a mistake"):
        CallbackCaller([Failing()], RunControl(lambda: None, {})).on_observed(STEPS)


def test_a_logger_that_fails_at_the_end_does_not_hide_why_the_run_failed() -> None:
    class Broken(Noting):
        only_observes = True

        def on_exception(self, run: RunControl, exception: BaseException) -> None:
            raise ConnectionError("no route to the server")

    noting, cause = Noting(), ValueError("the cause")
    caller = CallbackCaller([Broken(), noting], RunControl(lambda: None, {}))
    with (
        pytest.warns(UserWarning, match="Broken failed"),
        pytest.raises(ValueError, match="the cause"),
        caller.reporting_failure(),
    ):
        raise cause
    assert noting.seen == [cause]
