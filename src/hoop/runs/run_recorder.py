"""A disk that is full when a checkpoint is written, because a test asked for it.

What ``--out`` holds of a run.

config.json          every setting, resolved
metrics.jsonl        a line a step and an evaluation; the same in tensorboard/
checkpoints/         step-00000235.safetensors: weights, optimizer, position in the data
ledger.jsonl         what went into each step, as the devices told it
trace.json           for Perfetto or chrome://tracing, a track a device
curve.svg            loss and accuracy
timeline.svg         what each device did in the first steps
result.json          the summary

A full disk ends no training: what could not be written is said, once, and what was there stays.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hoop import files
from hoop.engine.settings import Settings
from hoop.errors import FailedPrecondition, ResourceExhausted
from hoop.files import remove_leftovers, write_text
from hoop.plan.faults import OF_FILES, Fault
from hoop.report.metrics import MetricsLog, read_metrics
from hoop.report.spans import Span
from hoop.report.tensorboard import TensorBoardLog
from hoop.report.timeline import TimelineChart
from hoop.report.trace import Trace
from hoop.report.training import training_chart
from hoop.runs.checkpoint_store import FOLDER, CheckpointWriter, Snapshot, set_aside, step_of
from hoop.runs.ledger import NAME, Ledger
from hoop.texts import parse_json


class DiskFullWarning:
    """Each fault makes the first checkpoint at its step or later find no room, once."""

    def __init__(self, faults: Sequence[Fault], done: Callable[[], int], tell: Callable[[str], None]) -> None:
        self._due = [fault for fault in faults if fault.kind == OF_FILES]
        self._done, self._tell = done, tell
        if self._due:
            files.BEFORE_WRITING.append(self._look)

    def _look(self, path: Path) -> None:
        for fault in self._due:
            if path.suffix == ".safetensors" and self._done() >= fault.step:
                self._due.remove(fault)
                self._tell(str(fault))
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def close(self) -> None:
        if self._look in files.BEFORE_WRITING:
            files.BEFORE_WRITING.remove(self._look)


FLUSH_S = 600.0
"""How long the disk may take for the last checkpoint."""
CLOSE_S = 30.0
"""The same, where the run has failed."""
_CONFIG, _METRICS = "config.json", "metrics.jsonl"


class RunRecorder:
    """Writes a run's files as it goes."""

    def __init__(
        self,
        out: Path,
        settings: Settings,
        devices: Sequence[int],
        resumed: Mapping[str, Any] | None = None,
    ) -> None:
        """``resumed``: the metadata of the checkpoint that the run goes on from."""
        self._out = out
        self._settings = settings
        self._warned: set[str] = set()
        self._told: list[dict[str, Any]] = []
        self._begun = False
        self._pending: dict[int, tuple[Mapping[str, Tensor], dict[str, Any]]] = {}
        start = int(resumed["steps"]) if resumed is not None else 0
        out.mkdir(parents=True, exist_ok=True)
        for folder in (out, out / FOLDER):
            if folder.is_dir():
                remove_leftovers(folder)
        self._ledger = Ledger(out / NAME, resumed)
        if resumed is not None:
            set_aside(out, start)
        self._keeper = CheckpointWriter(out / FOLDER, settings.keep)
        config = {"devices": len(devices), **json.loads(settings.to_json())}
        write_text(out / _CONFIG, json.dumps(config, indent=2) + "\n")
        metrics = out / _METRICS
        self._metrics = MetricsLog.resume(metrics, start) if start else MetricsLog.anew(metrics)
        self._board = TensorBoardLog(out / "tensorboard", resumes_after=start or None)

    def last_evaluation(self) -> dict[str, Any] | None:
        """The newest one noted so far, for a run that goes on after it."""
        for row in reversed(read_metrics(self._out / _METRICS)):
            for split in ("test", "train"):
                if f"{split}_loss" in row:
                    measured = {name: row[f"{split}_{name}"] for name in ("loss", "accuracy")}
                    return {"split": split, **measured}
        return None

    def note(self, told: Mapping[str, Any]) -> None:
        """Writes down what a job told."""
        for write in (self._account, self._measure):
            try:
                write(told)
            except ResourceExhausted as error:
                self.warn(f"{error}; training goes on")
        self._offer()

    def _account(self, told: Mapping[str, Any]) -> None:
        """Into the ledger."""
        match told["kind"]:
            case "started" if not self._begun:
                self._begun, settings = True, self._settings
                about = {"seed": settings.seed, "samples": told["samples"], "batch_size": settings.batch_size}
                about |= {"micros": settings.micros, "data": told["data"]}
                self._ledger.note([{"begin": told["done"], **about}])
            case "steps":
                self._ledger.note(
                    {"step": step, "by": one[0] if one else [], "fed": one[1] if one else ""}
                    for step, one in enumerate(told["fed"], start=told["first"] + 1)
                )
            case "lost":
                self._ledger.note([{"lost": told["device"]}])
            case "recovered":
                self._ledger.note([{"recovered": told["step"], "missing": told["missing"]}])

    def _measure(self, told: Mapping[str, Any]) -> None:
        """Into the metrics."""
        if told["kind"] == "steps":
            for index, (loss, seconds) in enumerate(zip(told["loss"], told["seconds"], strict=True)):
                step = told["first"] + index + 1
                self._metrics.log(step, loss=loss, seconds=seconds)
                self._board.scalar("loss", loss, step, told["time"])
        elif told["kind"] == "evaluated":
            values = {f"{told['split']}_{name}": told[name] for name in ("loss", "accuracy")}
            self._metrics.log(told["steps"], **values, epoch=told["epoch"])
            for tag, value in values.items():
                self._board.scalar(tag, value, told["steps"], told["time"])

    def warn(self, text: str) -> None:
        """Who follows the run is told, once for each text."""
        if text not in self._warned:
            self._warned.add(text)
            self._told.append({"kind": "warning", "text": text})

    def news(self) -> list[dict[str, Any]]:
        """Events of its own since the last time: ``checkpoint`` and ``warning``."""
        told, self._told = self._told, []
        return told + self._keeper.news()

    # ---- checkpoints

    def checkpoint(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], step: int) -> None:
        """To be written, with the hash of its step, as soon as the ledger has come to it."""
        self._pending[step] = (tensors, {**metadata, "settings": json.loads(self._settings.to_json())})
        self._offer()

    def _offer(self, all_of_them: bool = False) -> None:
        for step in sorted(self._pending):
            named = self._ledger.hash_at(step)
            if named is not None or all_of_them:
                tensors, about = self._pending.pop(step)
                self._keeper.offer(Snapshot(step, tensors, {**about, "ledger": named}, self._ledger.sync))

    def discard(self, step: int) -> None:
        """Nothing is kept of this step and later ones."""
        self._pending = {one: given for one, given in self._pending.items() if one < step}

    def flush(self, step: int) -> Path | None:
        """Waits for the disk; the checkpoint of this step, if it has it."""
        self._offer(all_of_them=True)
        self._keeper.flush(FLUSH_S)
        last = self._keeper.last
        return last if last is not None and step_of(last) == step else None

    def finish(self, result: Mapping[str, Any], accounts: Sequence[Mapping[str, Any]]) -> None:
        """The files that come at the end; the summary first, which is the smallest."""
        spans = [
            Span(f"device {account['rank']}", name, category, start * 1e6, seconds * 1e6)
            for account in accounts
            for name, category, start, seconds in account["spans"]
        ]
        try:
            write_text(self._out / "result.json", json.dumps(dict(result), indent=2) + "\n")
            self._draw(result, accounts, spans)
        except ResourceExhausted as error:
            self.warn(str(error))

    def _draw(
        self, result: Mapping[str, Any], accounts: Sequence[Mapping[str, Any]], spans: Sequence[Span]
    ) -> None:
        with Trace() as trace:
            trace.spans(spans)
            trace.write(self._out / "trace.json", {"job": self._settings.job})
        rows = read_metrics(self._out / _METRICS)
        title = f"{self._settings.job}, {result['devices']} devices, {self._settings.strategy}"
        write_text(self._out / "curve.svg", training_chart(rows, title).svg())
        if spans:
            first = min(span.start_us for span in spans)
            # A few steps are enough to see the pattern.
            shown = [span for span in spans if span.start_us < first + _few_steps(spans, accounts)]
            write_text(self._out / "timeline.svg", TimelineChart(title, shown).svg())

    def close(self) -> None:
        """What was handed over to be written is written, if the disk takes it."""
        self._keeper.flush(CLOSE_S)
        self._keeper.close(CLOSE_S)
        self._ledger.close()
        self._metrics.close()
        self._board.close()


def _few_steps(spans: Sequence[Span], accounts: Sequence[Mapping[str, Any]]) -> float:
    updates = sorted(span.end_us for span in spans if span.category == "update")
    tracks = max(1, len(accounts))
    last = updates[min(len(updates), 3 * tracks) - 1] if updates else max(span.end_us for span in spans)
    return float(last - min(span.start_us for span in spans))


def saved_settings(out: Path) -> tuple[Settings, int]:
    """The settings a run was started with, and its number of devices."""
    path = out / _CONFIG
    try:
        config = parse_json(path.read_text("utf-8"))
        devices = int(config.pop("devices"))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise FailedPrecondition(
            f"{path} is not a run's config ({error}); is {out} a folder of --out?"
        ) from None
    return Settings().replaced(config), devices
