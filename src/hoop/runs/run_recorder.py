"""Writes the files of a run into the folder that ``--out`` names.

    config.json          every setting, resolved
    metrics.jsonl        a line a step and an evaluation
    tensorboard/         the same for TensorBoard, with learning rate, speed and number of devices
    checkpoints/         step-00000235.safetensors: weights, optimizer, position in the data; best.safetensors
    events.jsonl         faults, recoveries, joins, checkpoints, warnings, with their times
    ledger.jsonl         provenance of each step, as the devices reported it
    trace.json           for Perfetto or chrome://tracing, a track a device
    result.json          the summary
    report.html          all of it as one page that works offline, if Bokeh is installed

One process at a time writes a folder: it has a lock on the file ``.lock`` there. A full disk ends no training, nor does
any other error of these files: one that could not be written is named once in a warning, and older files stay.
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from hoop import files
from hoop import job_events as ev
from hoop.engine.job import without_folder
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition, FileGone, HoopError
from hoop.files import FileLock, make_folder, remove_partial_files, write_text
from hoop.job_events import JobEvent, Observed
from hoop.plan.faults import DISK_FULL, Fault
from hoop.report.metrics import MetricsLog, read_metrics
from hoop.report.run_events import NAME as EVENTS
from hoop.report.run_events import RunEventLog
from hoop.report.spans import Span
from hoop.report.tensorboard import TensorBoardLog
from hoop.report.trace import Trace
from hoop.runs.checkpoint_store import FOLDER, CheckpointWriter, Snapshot, listed, read, set_aside, step_of
from hoop.runs.ledger import NAME, Ledger
from hoop.texts import parse_json


class DiskFullInjector:
    """Injects faults of kind ``disk-full``: each makes the first checkpoint write at or after its step fail, once."""

    def __init__(self, faults: Sequence[Fault], done: Callable[[], int], on_fault: Callable[[str], None]) -> None:
        """``done``: steps done so far. ``on_fault`` is called with the text of each fault that is injected."""
        self._due = [fault for fault in faults if fault.kind == DISK_FULL]
        self._done, self._on_fault = done, on_fault
        if self._due:
            files.BEFORE_WRITE_HOOKS.append(self._before_writing)

    def _before_writing(self, path: Path) -> None:
        for fault in self._due:
            if path.suffix == ".safetensors" and self._done() >= fault.step:
                self._due.remove(fault)
                self._on_fault(str(fault))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def close(self) -> None:
        if self._before_writing in files.BEFORE_WRITE_HOOKS:
            files.BEFORE_WRITE_HOOKS.remove(self._before_writing)


FLUSH_S = 600.0
"""Timeout in seconds for writing the last checkpoint."""
CLOSE_S = 30.0
"""Timeout in seconds for writing the last checkpoint of a run that failed."""
NO_REPORT = "HOOP_NO_REPORT"
"""Environment variable: 1 leaves out ``report.html``, which takes about 2 s at the end of a run."""
_CONFIG, _METRICS, _RESULT = "config.json", "metrics.jsonl", "result.json"


def lock_folder(out: Path) -> FileLock:
    """Makes the folder of a run, and takes the right to write it, which one process has at a time."""
    make_folder(out, "out (--out)")
    remedy = "wait until that run has ended, or stop it, or name another folder (--out)"
    return FileLock(out, remedy, required=False)


class RunRecorder:
    """Writes a run's files while it trains."""

    def __init__(
        self,
        out: Path,
        settings: Settings,
        devices: Sequence[int],
        resumed: Mapping[str, Any] | None = None,
        attached: bool = False,
        lock: FileLock | None = None,
    ) -> None:
        """``resumed``: metadata of the checkpoint that the run resumes from.

        ``attached``: the folder may be that of this run, of which all is reported again. ``lock``: of ``lock_folder``,
        which ``close`` releases; None: it is taken here. FailedPrecondition if another process writes the folder, or
        has written a run into it since it was chosen.
        """
        self._out = out
        self._settings = settings
        self._warned: set[str] = set()
        self._events: list[JobEvent] = []
        self._num_logged = 0
        """Number of the first ``_events`` that are in the events file."""
        self._started = False
        self._plan: ev.Started | None = None
        self._pending: dict[int, Snapshot] = {}
        self._lost: set[str] = set()
        """Files that somebody has deleted or replaced while they were being written."""
        start = int(resumed["steps"]) if resumed is not None else 0
        self._done = start
        """Number of the last step that was reported."""
        self._lock = lock or lock_folder(out)
        try:
            if not attached:
                self._check_unchanged(None if resumed is None else start)
            self._open(devices, resumed)
        except BaseException:
            self._lock.release()
            raise
        if not self._lock.exclusive:
            self.warn(f"{out}: its file system has no locks; see to it that no other run writes this folder")

    def _check_unchanged(self, resumed: int | None) -> None:
        """Raises if a run has written checkpoints here since this folder was chosen. ``resumed``: the newest then."""
        for path in listed(self._out / FOLDER):
            try:
                newer = resumed is None or (step_of(path) > resumed and bool(read(path)))
            except HoopError:
                continue  # damaged: it is set aside
            if newer:
                raise FailedPrecondition(
                    f"out (--out): another run has written {path} meanwhile; go on with it by --resume, or name "
                    "another folder"
                )

    def _open(self, devices: Sequence[int], resumed: Mapping[str, Any] | None) -> None:
        out, settings, start = self._out, self._settings, self._done
        for folder in (out, out / FOLDER):
            if folder.is_dir():
                remove_partial_files(folder)
        self._ledger = Ledger(out / NAME, resumed)
        if resumed is not None:
            set_aside(out, start)
        self._writer = CheckpointWriter(out / FOLDER, settings.keep)
        config = {"devices": len(devices), **json.loads(settings.to_json())}
        write_text(out / _CONFIG, json.dumps(config, indent=2) + "\n")
        metrics = out / _METRICS
        self._metrics = MetricsLog.resume(metrics, start) if start else MetricsLog.create(metrics)
        self._event_log = RunEventLog(out / EVENTS, resume=resumed is not None)
        self._board = TensorBoardLog(out / "tensorboard", resumes_after=start or None)

    def last_evaluation(self) -> dict[str, Any] | None:
        """Split, loss and accuracy of the newest evaluation in the metrics, for a run that resumes."""
        for row in reversed(read_metrics(self._out / _METRICS)):
            for split in ("test", "train"):
                if f"{split}_loss" in row:
                    measured = {name: row.get(f"{split}_{name}") for name in ("loss", "accuracy")}
                    return {"split": split, **measured}
        return None

    def record(self, observed: Observed) -> None:
        """Writes an event of the job to the ledger, the metrics and the events."""
        if isinstance(observed.event, ev.Evaluated) and observed.event.best:
            self._writer.mark_best(observed.event.steps)
        for file, write in (
            (NAME, self._write_ledger),
            (_METRICS, self._write_metrics),
            (EVENTS, self._write_event),
        ):
            with self._surviving(file):
                write(observed)
        self._offer()

    @contextmanager
    def _surviving(self, file: str) -> Iterator[None]:
        """An error of the block, which writes this file, is a warning."""
        try:
            yield
        except FileGone as error:
            self._lost.add(file)
            self.warn(f"{error}; training goes on, and the record of this run is not whole", file)
        except (HoopError, OSError) as error:
            self.warn(f"{error}; training goes on", file)

    def _write_ledger(self, observed: Observed) -> None:
        event = observed.event
        match event:
            case ev.Started() if not self._started:
                self._started, settings = True, self._settings
                about: dict[str, Any] = {
                    "seed": settings.seed,
                    "samples": event.samples,
                    "batch_size": settings.batch_size,
                }
                about |= {"micros": settings.num_microbatches, "data": event.data, "strategy": settings.strategy}
                self._ledger.append([{"begin": event.done, **about}])
            case ev.Steps():
                self._ledger.append(
                    {"step": step, "by": one[0] if one else [], "fed": one[1] if one else ""}
                    for step, one in enumerate(event.fed, start=event.first + 1)
                )
            case ev.DeviceLost():
                self._ledger.append([{"lost": event.device}])
            case ev.Reassigned():
                self._ledger.append([{"assigned": event.devices}])
            case ev.Recovered():
                self._ledger.append([{"recovered": event.step, "missing": event.missing}])

    def _write_event(self, observed: Observed) -> None:
        event = observed.event
        if isinstance(event, ev.Steps):
            self._done = max(self._done, event.first + len(event.loss))
        self._event_log.log(observed, self._done)

    def _write_metrics(self, observed: Observed) -> None:
        event = observed.event
        match event:
            case ev.Steps():
                rows = zip(event.loss, event.seconds, strict=True)
                for index, (loss, seconds) in enumerate(rows):
                    step, extra = event.first + index + 1, {name: each[index] for name, each in event.metrics.items()}
                    self._metrics.log(step, loss=loss, seconds=seconds, **extra)
                    for tag, value in {"loss": loss, **extra}.items():
                        self._board.scalar(tag, value, step, observed.time)
                self._write_speed(event, observed.time)
            case ev.Started():
                self._plan = event
                self._board.scalar("devices", event.devices, event.done, observed.time)
            case ev.Resized() | ev.Recovered():
                self._board.scalar("devices", event.ranks, event.step, observed.time)
            case ev.Evaluated():
                values = {f"{event.split}_loss": event.loss}
                if event.accuracy is not None:
                    values[f"{event.split}_accuracy"] = event.accuracy
                values |= {f"{event.split}_{name}": value for name, value in event.metrics.items()}
                self._metrics.log(event.steps, **values, epoch=event.epoch)
                for tag, value in {**values, "epoch": event.epoch}.items():
                    self._board.scalar(tag, value, event.steps, observed.time)

    def _write_speed(self, event: ev.Steps, time: float) -> None:
        """Writes learning rate and speed of the steps of an event, as of its last step."""
        last, seconds = event.first + len(event.loss), sum(event.seconds)
        self._board.scalar("learning_rate", event.rate, last, time)
        if seconds > 0:
            samples = self._samples_until(last) - self._samples_until(event.first)
            self._board.scalar("samples_per_second", samples / seconds, last, time)
            self._board.scalar("step_seconds", seconds / len(event.seconds), last, time)

    def _samples_until(self, step: int) -> int:
        """Samples in the first ``step`` steps of the run; the last batch of an epoch may be shorter."""
        if self._plan is None:
            return step * self._settings.batch_size
        epochs, rest = divmod(step, max(1, self._plan.steps_an_epoch))
        return epochs * self._plan.samples + rest * self._settings.batch_size

    def warn(self, text: str, file: str = "") -> None:
        """Adds a warning to ``new_events``, once for each text. ``file``: the one that it is about."""
        if text not in self._warned:
            self._warned.add(text)
            self._events.append(ev.Warned(text, file=str(self._out / file) if file else ""))

    def new_events(self) -> list[JobEvent]:
        """``CheckpointWritten`` and ``Warned`` events since the last call."""
        self._log_own_events()
        found, self._events = self._events, []
        self._num_logged = 0
        return found

    def _log_own_events(self) -> None:
        """Writes to the events file what this object reports itself: its warnings and checkpoints."""
        self._events += self._writer.new_events()
        new, self._num_logged = self._events[self._num_logged :], len(self._events)
        for event in new:
            with self._surviving(EVENTS):
                self._event_log.log(Observed(event), self._done)

    # ---- checkpoints

    def checkpoint(
        self,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        step: int,
        checksums: Mapping[str, str] | None = None,
    ) -> None:
        """Writes a checkpoint, with the ledger's hash of its step, as soon as the ledger has that step.

        ``checksums``: of the tensors, by name, if they are known.
        """
        settings = replace(self._settings, job=without_folder(self._settings.job))
        about = {**metadata, "settings": json.loads(settings.to_json())}
        self._pending[step] = Snapshot(step, tensors, about, checksums or {}, self._ledger.sync)
        self._offer()

    def _offer(self, all_of_them: bool = False) -> None:
        for step in sorted(self._pending):
            named = self._ledger.hash_at(step)
            if named is not None or all_of_them:
                one = self._pending.pop(step)
                self._writer.offer(replace(one, metadata={**one.metadata, "ledger": named}))

    def discard(self, step: int) -> None:
        """Drops pending checkpoints of this step and later ones."""
        self._pending = {one: given for one, given in self._pending.items() if one < step}

    def flush(self, step: int) -> Path | None:
        """Waits for the disk. Returns the checkpoint of this step, or None if it could not be written."""
        self._offer(all_of_them=True)
        self._writer.flush(FLUSH_S)
        last = self._writer.last
        return last if last is not None and step_of(last) == step and last.exists() else None

    def finish(self, result: Mapping[str, Any], accounts: Mapping[int, ev.Account]) -> None:
        """Writes result, trace and report; the summary first, because it is the smallest. ``accounts``: by device."""
        spans = [
            Span(f"device {device}", name, category, start * 1e6, seconds * 1e6)
            for device, account in accounts.items()
            for name, category, start, seconds in account.spans
        ]
        with self._surviving(_RESULT):
            write_text(self._out / _RESULT, json.dumps(dict(result), indent=2) + "\n")
        with self._surviving("trace.json"), Trace() as trace:
            trace.spans(spans)
            trace.write(self._out / "trace.json", {"job": self._settings.job})
        self._write_report()

    def lost_files(self) -> list[str]:
        """Names of the files that somebody has deleted or replaced while they were being written."""
        if not self._lock.held:
            self._lost.add(self._lock.path.name)
            self.warn(f"{self._out}: it was deleted, moved or replaced while this run wrote it")
        return sorted(self._lost)

    def _write_report(self) -> None:
        """Writes ``report.html`` from the files of this folder. An error is a warning: the training is done."""
        if os.environ.get(NO_REPORT, "") not in ("", "0") or importlib.util.find_spec("bokeh") is None:
            return
        self._log_own_events()
        try:
            from hoop.report.run_report import write_run_report  # Bokeh takes a second to import

            write_run_report(self._out)
        except Exception as error:
            self.warn(f"report.html could not be written: {type(error).__name__}: {error}")

    def close(self) -> None:
        """What was handed over to be written is written, if the disk takes it."""
        self._writer.flush(CLOSE_S)
        self._writer.close(CLOSE_S)
        self._ledger.close()
        self._metrics.close()
        self._event_log.close()
        self._board.close()
        self._lock.release()


def saved_settings(out: Path) -> tuple[Settings, int]:
    """The settings a run was started with, and its number of devices."""
    path = out / _CONFIG
    try:
        config = parse_json(path.read_text("utf-8"))
        devices = int(config.pop("devices"))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise FailedPrecondition(f"{path} is not a run's config ({error}); is {out} a folder of --out?") from None
    return Settings().replaced(config), devices
