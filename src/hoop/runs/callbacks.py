"""Callbacks of ``hoop.train``: methods that it calls while a run trains, and loggers made of them.

    result = hoop.train(model, data, callbacks=[hoop.TensorBoardLogger(SummaryWriter("runs/1"))])

They run in the process that called ``hoop.train``, beside training: devices do not wait for them. What they do cannot
change the weights, except that ``run.stop()`` ends the run after a step. For an end at the same step on every machine
use early stopping (``patience=3``).
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hoop import job_events as ev
from hoop.errors import InvalidArgument
from hoop.job_events import Observed

_PLAIN = (str, bool, int, float)
"""Types of the values that an attribute of a span of OpenTelemetry can have."""


class RunControl:
    """The run, as callbacks see it."""

    def __init__(self, stop: Callable[[], None], settings: Mapping[str, Any]) -> None:
        self._stop = stop
        self.settings = settings
        """Settings of the run."""

    def stop(self) -> None:
        """Ends the run after the current step, with its result."""
        self._stop()


class Callback:
    """Base class: override the methods that you need. ``run`` can stop the run. An exception of a method ends it."""

    only_observes = False
    """True for loggers: an exception of a method is a warning, and the callback is not called any more."""

    def on_start(self, run: RunControl, steps: int, parameters: int) -> None:
        """Training begins: ``steps`` in all, a model of ``parameters``."""

    def on_step(self, run: RunControl, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        """A step is done; ``step`` counts from 1. Called for every step, in order, up to a second later.

        ``metrics``: those that the loss function returned, and ``learning_rate``.
        """

    def on_evaluate(
        self,
        run: RunControl,
        step: int,
        loss: float,
        accuracy: float | None,
        metrics: Mapping[str, float],
        best: bool,
    ) -> None:
        """The model was evaluated after ``step`` steps. ``best``: no evaluation before was better."""

    def on_checkpoint(self, run: RunControl, step: int, path: str) -> None:
        """A checkpoint was written (with ``out``)."""

    def on_event(self, run: RunControl, event: Mapping[str, Any]) -> None:
        """Any event of the run, as a dict (docs/run-folder.md, Events): lost devices, recoveries, warnings …"""

    def on_end(self, run: RunControl, summary: Mapping[str, Any]) -> None:
        """The run is over; ``summary`` is ``Result.summary``."""

    def on_exception(self, run: RunControl, exception: BaseException) -> None:
        """The run failed, or was interrupted; ``hoop.train`` raises the exception when all callbacks have returned."""


def check_callbacks(callbacks: Any) -> list[Callback]:
    """The callbacks; raises InvalidArgument unless all are objects of ``hoop.Callback``."""
    if callbacks is None:
        return []
    found = list(callbacks) if isinstance(callbacks, Sequence) else [callbacks]
    for one in found:
        if not isinstance(one, Callback):
            given = f"the class {one.__name__}" if isinstance(one, type) else type(one).__name__
            raise InvalidArgument(f"callbacks: {given} is not an object of a subclass of hoop.Callback")
    return found


class CallbackCaller:
    """Calls the methods of callbacks for the events of a run."""

    def __init__(self, callbacks: Sequence[Callback], run: RunControl) -> None:
        self._callbacks, self._run = list(callbacks), run

    def on_observed(self, observed: Observed) -> None:
        for callback in list(self._callbacks):
            with self._dropping(callback):
                self._deliver(callback, observed)

    def _deliver(self, callback: Callback, observed: Observed) -> None:
        match event := observed.event:
            case ev.Started():
                callback.on_start(self._run, event.steps, event.parameters)
            case ev.Steps():
                for index, loss in enumerate(event.loss):
                    metrics = {name: each[index] for name, each in event.metrics.items()}
                    callback.on_step(self._run, event.first + index + 1, loss, metrics | {"learning_rate": event.rate})
            case ev.Evaluated():
                callback.on_evaluate(self._run, event.steps, event.loss, event.accuracy, event.metrics, event.best)
            case ev.CheckpointWritten():
                callback.on_checkpoint(self._run, event.steps, event.file)
            case ev.Finished():
                callback.on_end(self._run, event.result)
        callback.on_event(self._run, observed.to_fields())

    @contextlib.contextmanager
    def _dropping(self, callback: Callback) -> Iterator[None]:
        """Raises an error of the block, or drops the callback with a warning if the callback only observes."""
        try:
            yield
        except Exception as error:
            if not callback.only_observes:
                raise
            self._callbacks.remove(callback)
            warnings.warn(
                f"{type(callback).__name__} failed, and is not called any more; training goes on: "
                f"{type(error).__name__}: {error}",
                stacklevel=4,
            )

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Inside, an exception is passed to every callback before it is raised."""
        try:
            yield
        except BaseException as exception:
            for callback in list(self._callbacks):
                with self._dropping(callback):
                    callback.on_exception(self._run, exception)
            raise


class _MetricLogger(Callback):
    """Logs losses and metrics by tag, value and step."""

    only_observes = True

    def log(self, values: Mapping[str, float], step: int) -> None:
        raise NotImplementedError

    def on_step(self, run: RunControl, step: int, loss: float, metrics: Mapping[str, float]) -> None:
        self.log({"train/loss": loss, **{f"train/{name}": value for name, value in metrics.items()}}, step)

    def on_evaluate(
        self,
        run: RunControl,
        step: int,
        loss: float,
        accuracy: float | None,
        metrics: Mapping[str, float],
        best: bool,
    ) -> None:
        found = {"loss": loss, **({} if accuracy is None else {"accuracy": accuracy}), **metrics}
        self.log({f"evaluation/{name}": value for name, value in found.items()}, step)


class TensorBoardLogger(_MetricLogger):
    """Logs to a ``torch.utils.tensorboard.SummaryWriter``."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            self._writer.add_scalar(tag, value, step)

    def on_end(self, run: RunControl, summary: Mapping[str, Any]) -> None:
        self._writer.flush()


class WandbLogger(_MetricLogger):
    """Logs to a run of Weights & Biases, which ``wandb.init()`` returned."""

    def __init__(self, run: Any) -> None:
        self._wandb = run

    def on_start(self, run: RunControl, steps: int, parameters: int) -> None:
        self._wandb.config.update(dict(run.settings), allow_val_change=True)

    def log(self, values: Mapping[str, float], step: int) -> None:
        self._wandb.log(dict(values), step=step)


class MlflowLogger(_MetricLogger):
    """Logs to MLflow: to the module ``mlflow``, which has an active run, or to an ``MlflowClient`` with a run's id."""

    def __init__(self, mlflow: Any, run_id: str | None = None) -> None:
        self._mlflow, self._run_id = mlflow, run_id

    def log(self, values: Mapping[str, float], step: int) -> None:
        for tag, value in values.items():
            if self._run_id is None:
                self._mlflow.log_metric(tag, value, step=step)
            else:
                self._mlflow.log_metric(self._run_id, tag, value, step=step)


class OpenTelemetryLogger(Callback):
    """Makes a trace of the run with a tracer of OpenTelemetry, ``opentelemetry.trace.get_tracer("mine")``.

    The run is a span. Its children are spans of reported steps, recoveries, changes of the number of devices, and
    checkpoints; lost devices, evaluations and warnings are events of it. The span of a run that fails has the status
    ``ERROR`` and the exception.
    """

    only_observes = True

    def __init__(self, tracer: Any) -> None:
        self._trace = importlib.import_module("opentelemetry.trace")
        self._tracer = tracer
        self._span: Any = None
        """Span of the run; None before it starts and after it ends."""
        self._began = 0.0
        """When that span began, in seconds since the epoch."""

    def _start(self, run: RunControl, started: ev.Started, time: float) -> None:
        """Starts the span of the run at the time of the event, which comes here later."""
        if self._span is not None:  # the devices were started again
            self._end()
        self._began = time
        settings = {f"hoop.{name}": value for name, value in run.settings.items() if isinstance(value, _PLAIN)}
        self._span = self._tracer.start_span(
            "hoop.train",
            attributes={**settings, "hoop.steps": started.steps, "hoop.parameters": started.parameters},
            start_time=_nanoseconds(time),
        )

    def on_event(self, run: RunControl, event: Mapping[str, Any]) -> None:
        if event["kind"] not in ev.KINDS:
            return
        observed = Observed.from_fields(event)
        if isinstance(observed.event, ev.Started):
            self._start(run, observed.event, observed.time)
        if self._span is None:
            return
        found: dict[str, Any]
        match observed.event:
            case ev.Steps() as steps:
                last = steps.first + len(steps.loss)
                found = {"first": steps.first + 1, "last": last, "loss": steps.loss[-1]} if steps.loss else {}
                self._child("steps", observed.time, sum(steps.seconds), found)
            case ev.Recovered() | ev.Resized() as change:
                found = {"step": change.step, "text": change.text, "ranks": change.ranks, "shards": change.missing}
                self._child(change.kind, observed.time, change.pause_s, found)
            case ev.CheckpointWritten() as written:
                found = {"steps": written.steps, "file": written.file, "bytes": written.bytes}
                self._child(written.kind, observed.time, written.seconds, found)
            case ev.DeviceLost() | ev.Evaluated() | ev.FaultInjected() | ev.Warned() | ev.Refused() as happened:
                fields = {name: value for name, value in happened.to_fields().items() if isinstance(value, _PLAIN)}
                self._span.add_event(happened.kind, fields, _nanoseconds(observed.time))

    def on_end(self, run: RunControl, summary: Mapping[str, Any]) -> None:
        if self._span is not None:
            found = {name: value for name, value in summary.items() if isinstance(value, _PLAIN)}
            self._span.set_attributes({f"hoop.{name}": value for name, value in found.items()})
            self._end()

    def on_exception(self, run: RunControl, exception: BaseException) -> None:
        if self._span is not None:
            self._span.record_exception(exception)
            self._span.set_status(self._trace.StatusCode.ERROR, str(exception))
            self._end()

    def _child(self, name: str, end: float, seconds: float, attributes: Mapping[str, Any]) -> None:
        """A span that ended at ``end``, in seconds since the epoch.

        It begins with the run's at the earliest. A device that recovers from a loss before the first step reports
        the start of the run afterwards.
        """
        span = self._tracer.start_span(
            f"hoop.{name}",
            self._trace.set_span_in_context(self._span),
            attributes={f"hoop.{field}": value for field, value in attributes.items()},
            start_time=_nanoseconds(max(end - seconds, min(self._began, end))),
        )
        span.end(_nanoseconds(end))

    def _end(self) -> None:
        self._span.end()
        self._span = None


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
