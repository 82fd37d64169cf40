"""What ``--out`` holds of a run.

config.json          every setting, resolved
metrics.jsonl        a line a step and an evaluation; the same in tensorboard/
checkpoints/         step-00000235.safetensors: weights, optimizer, position in the data
trace.json           for Perfetto or chrome://tracing, a track a device
curve.svg            loss and accuracy
timeline.svg         what each device did in the first steps
result.json          the summary
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hoop.engine.settings import Settings
from hoop.engine.snapshot import packed, unpacked
from hoop.errors import FailedPrecondition, HoopError
from hoop.files import remove_leftovers, write_bytes, write_text
from hoop.report.metrics import MetricsLog, read_metrics
from hoop.report.spans import Span
from hoop.report.tensorboard import TensorBoardLog
from hoop.report.timeline import Timeline
from hoop.report.trace import Trace
from hoop.report.training import training_chart

KEPT = 3
"""Checkpoints that stay."""
_CONFIG, _METRICS, _CHECKPOINTS = "config.json", "metrics.jsonl", "checkpoints"


class Recording:
    """Writes a run's files as it goes."""

    def __init__(self, out: Path, settings: Settings, devices: Sequence[int], start: int) -> None:
        self._out = out
        self._settings = settings
        out.mkdir(parents=True, exist_ok=True)
        for folder in (out, out / _CHECKPOINTS):
            if folder.is_dir():
                remove_leftovers(folder)
        config = {"devices": len(devices), **json.loads(settings.to_json())}
        write_text(out / _CONFIG, json.dumps(config, indent=2) + "\n")
        metrics = out / _METRICS
        self._metrics = MetricsLog.resume(metrics, start) if start else MetricsLog.anew(metrics)
        self._board = TensorBoardLog(out / "tensorboard", resumes_after=start or None)

    def last_evaluation(self) -> dict[str, Any] | None:
        """The newest one noted so far, for a run that goes on after it."""
        found = [row for row in read_metrics(self._out / _METRICS) if "test_loss" in row]
        return {"loss": found[-1]["test_loss"], "accuracy": found[-1]["test_accuracy"]} if found else None

    def note(self, told: Mapping[str, Any]) -> None:
        if told["kind"] == "steps":
            for index, (loss, seconds) in enumerate(zip(told["loss"], told["seconds"], strict=True)):
                step = told["first"] + index + 1
                self._metrics.log(step, loss=loss, seconds=seconds)
                self._board.scalar("loss", loss, step, told["time"])
        elif told["kind"] == "evaluated":
            values = {"test_loss": told["loss"], "test_accuracy": told["accuracy"], "epoch": told["epoch"]}
            self._metrics.log(told["steps"], **values)
            for tag in ("test_loss", "test_accuracy"):
                self._board.scalar(tag, values[tag], told["steps"], told["time"])

    def checkpoint(self, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any], step: int) -> None:
        """Atomically, and the oldest ones go."""
        folder = self._out / _CHECKPOINTS
        about = {**metadata, "settings": json.loads(self._settings.to_json())}
        write_bytes(folder / f"step-{step:08}.safetensors", packed(tensors, about))
        for old in sorted(folder.glob("step-*.safetensors"))[:-KEPT]:
            old.unlink(missing_ok=True)

    def finish(self, result: Mapping[str, Any], accounts: Sequence[Mapping[str, Any]]) -> None:
        spans = [
            Span(f"device {account['rank']}", name, category, start * 1e6, seconds * 1e6)
            for account in accounts
            for name, category, start, seconds in account["spans"]
        ]
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
            write_text(self._out / "timeline.svg", Timeline(title, shown).svg())
        write_text(self._out / "result.json", json.dumps(dict(result), indent=2) + "\n")

    def close(self) -> None:
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
        config = json.loads(path.read_text("utf-8"))
        devices = int(config.pop("devices"))
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise FailedPrecondition(
            f"{path} is not a run's config ({error}); is {out} a folder of --out?"
        ) from None
    return Settings().replaced(config), devices


def newest_checkpoint(out: Path) -> Path:
    """The newest checkpoint that is whole; damaged ones are passed over."""
    folder = out / _CHECKPOINTS if (out / _CHECKPOINTS).is_dir() else out
    problems = []
    for path in sorted(folder.glob("*.safetensors"), reverse=True):
        try:
            unpacked(path.read_bytes())
            return path
        except (HoopError, OSError) as error:
            problems.append(f"{path.name}: {error}")
    whole = f" that is whole: {'; '.join(problems)}" if problems else "; a run keeps one after each epoch"
    raise FailedPrecondition(f"no checkpoint in {folder}{whole}")
