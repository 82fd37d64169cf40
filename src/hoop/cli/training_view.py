"""The output of ``hoop train`` and ``hoop attach``: live progress on a terminal, lines in a log, and a summary."""

from __future__ import annotations

import json as json_module
import time
from collections import deque
from pathlib import Path
from types import TracebackType
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from hoop import job_events as ev
from hoop.cli.output import echo, plain, shown
from hoop.config import format_size
from hoop.job_events import JobEvent

LINE_S = 10.0
"""Seconds between lines of progress, if there is no terminal."""
WINDOW = 40
"""Number of events over which the speed is measured."""


class PlainView:
    """The view of ``--json``: warnings on standard error, and nothing else."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def note(self, event: JobEvent) -> None:
        """Shows an event of the job."""
        if isinstance(event, ev.Warned | ev.RoundingDiffers):
            echo(f"warning: {event.text}", err=True)

    def summary(self, result: dict[str, Any], out: Path | None) -> None:
        pass


class View(PlainView):
    """The view for people, on standard error."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}", markup=False),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, figures="")
        self._started: ev.Started | None = None
        self._devices = 0
        self._accuracy = ""
        self._losses: list[float] = []
        self._marks: deque[tuple[float, int]] = deque(maxlen=WINDOW)
        self._printed = 0.0

    def __enter__(self) -> View:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()

    def say(self, text: str) -> None:
        if self._live:
            self._progress.update(self._task, figures=shown(text))
        else:
            self._print(text)

    def _print(self, text: str) -> None:
        self._console.print(plain(text))

    def note(self, event: JobEvent) -> None:
        match event:
            case ev.Started():
                self._start(event)
            case ev.Steps():
                self._advance(event)
            case ev.Evaluated():
                self._evaluated(event)
            case ev.Warned() | ev.RoundingDiffers():
                self._print(f"warning: {event.text}")
            case ev.DeviceLost():
                self._print(f"device {event.device} was lost: {event.text}")
            case ev.Straggler(slow=True):
                slower = f"{event.times:.1f} times slower than the others"
                self._print(f"step {event.step}: rank {event.straggler} is a straggler, {slower}: it gets fewer shards")
            case ev.Straggler():
                self._print(f"step {event.step}: rank {event.straggler} is no straggler any more")
            case ev.FaultInjected():
                self._print(f"step {event.step}: {event.fault}, as asked")
            case ev.Damaged():
                self._print(f"damaged on the way, and sent again: {event.text}")
            case (
                ev.CoordinatorLost()
                | ev.CoordinatorBack()
                | ev.WaitingForRestart()
                | ev.WaitingForDevice()
                | ev.Refused()
            ):
                self._print(event.text)
            case ev.StateLoaded():
                self._print(f"step {event.step}: device {event.device} has its state from {event.source}")
            case ev.Reassigned():
                for text in event.left_out.values():
                    self._console.print(text)
            case ev.Resized():
                self._devices = event.ranks
                self._print(f"step {event.step}: goes on with {_devices(event.ranks)}")
            case ev.Recovered():
                self._devices = event.ranks
                self._print(f"step {event.step}: goes on with {_devices(event.ranks)}, {event.pause_s:.1f} s later")

    def _start(self, event: ev.Started) -> None:
        self._started, self._devices = event, event.devices
        self._marks.append((time.monotonic(), event.done))
        self._printed = time.monotonic()
        self._progress.reset(self._task, total=event.steps, completed=event.done, figures="", description="epoch 1")
        after = f", after step {event.done}" if event.done else ""
        lines = [
            f"{event.parameters:,} parameters on {_devices(event.devices)}",
            f"{event.steps} steps{after}",
            f"first step after {event.seconds:.1f} s",
        ]
        self._print(" · ".join(lines))
        if len(event.stages) > 1:
            for stage, where in enumerate(event.stages):
                self._print(f"  stage {stage}: {where}")

    def _advance(self, event: ev.Steps) -> None:
        done = event.first + len(event.loss)
        self._losses += event.loss
        self._marks.append((time.monotonic(), done))
        assert self._started is not None, "Started comes before Steps"
        per_epoch, steps = self._started.steps_an_epoch, self._started.steps
        epoch = f"epoch {(done - 1) // per_epoch + 1}/{-(-steps // per_epoch)}"
        loss = sum(event.loss) / len(event.loss)
        figures = [f"step {done}/{steps}", f"loss {loss:.4f}", self._accuracy, self._speed()]
        figures.append(_devices(self._devices))
        text = " · ".join(filter(None, figures))
        self._progress.update(self._task, completed=done, description=epoch, figures=text)
        if not self._live and time.monotonic() - self._printed > LINE_S:
            self._printed = time.monotonic()
            self._print(f"{epoch} · {text}{self._left(done, steps)}")

    def _speed(self) -> str:
        """Samples a second over the last events; empty before the second one."""
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        if last <= first or now <= then or self._started is None:
            return ""
        return f"{(now - then) * self._started.batch_size / (last - first):,.0f} samples/s"

    def _left(self, done: int, steps: int) -> str:
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        return f" · {(steps - done) * (last - first) / (now - then):.0f} s left" if now > then else ""

    def _evaluated(self, event: ev.Evaluated) -> None:
        shown = [] if event.accuracy is None else [f"{_accuracy(event.split)} {event.accuracy:.2%}"]
        shown += [f"{name} {value:.4g}" for name, value in event.metrics.items() if name != "accuracy"]
        self._accuracy = "  ".join(shown)
        self._printed = time.monotonic()
        trained = f"loss {sum(self._losses) / len(self._losses):.4f}  " if self._losses else ""
        self._losses = []
        self._print(
            f"epoch {event.epoch:>3}  {trained}{'test' if event.split == 'test' else 'training'} loss "
            f"{event.loss:.4f}  {self._accuracy}  {self._speed()}"
        )

    def summary(self, result: dict[str, Any], out: Path | None) -> None:
        """Prints the result in a few lines on standard output."""
        measured = result.get("accuracy") is not None
        accuracy = f"{_accuracy(result['split'])} {result['accuracy']:.2%}  " if measured else ""
        stopped = f"stopped after {result['steps']}" if result["stopped"] else f"{result['steps']}"
        at_the_end = len(result["device_ids"])
        changed = f" at first, {at_the_end} at the end" if at_the_end != result["devices"] else ""
        echo(
            f"{accuracy}{stopped} steps in {result['seconds']:.1f} s  {result['samples_per_second']:,.0f} samples/s  "
            f"{_devices(result['devices'])}{changed}, {result['strategy']}"
        )
        by_rank = zip(result["device_ids"], result["shares"], result["memory"], strict=True)
        for rank, (device, one, memory) in enumerate(by_rank):
            echo(
                f"  device {device} (rank {rank}): compute {one['compute']:.0%}  communication "
                f"{one['communicate']:.0%}  idle {one['idle']:.0%}  memory {format_size(memory)}"
            )
        moved = result.get("shards_moved")
        rebalanced = f"; shards followed the devices' speed {moved} times" if moved else ""
        echo(f"  moved {format_size(result['bytes_sent'])} between devices{rebalanced}")
        if result.get("stragglers"):
            slow = ", ".join(
                f"rank {one['rank']} from step {one['step']} on, {one['times']:.1f} times slower"
                for one in result["stragglers"]
            )
            echo(f"  stragglers: {slow}")
        for one in result.get("states", ()):
            echo(f"  device {one['device']} came at step {one['step']}; state: from {one['source']}")
        if result.get("damaged"):
            echo(f"  messages damaged on the way and sent again: {result['damaged']}")
        if result.get("prediction_error") is not None:
            echo(
                f"  a step took {1e3 * result['step_seconds']:.2f} ms (median); the simulator predicted "
                f"{1e3 * result['predicted_step_seconds']:.2f} ms: {_difference(result['prediction_error'])}"
            )
        echo(f"  weights sha256 {result['weights_sha256']}")
        if out is not None:
            again = f"; go on: hoop train --resume --out {out}" if result["stopped"] else ""
            echo(f"  kept in {out}{again}")
        elif result["stopped"]:
            echo("  nothing was kept: no --out was given")


def _accuracy(split: str) -> str:
    """The name of an accuracy on this split: training accuracy is never called test accuracy."""
    return "accuracy" if split == "test" else "training accuracy"


def _difference(error: float) -> str:
    """The measured time of a step compared with the predicted one."""
    if error > 1:  # a percentage of several hundred reads as a fault
        return f"{1 + error:.1f} times that; other work on the same cores does this"
    return f"{abs(error):.0%} {'more' if error > 0 else 'less'}"


def _devices(count: int) -> str:
    return f"{count} device{'' if count == 1 else 's'}"


def show_recipes(json: bool) -> None:
    """The recipes, with their main settings."""
    from hoop.engine.recipes import RECIPES

    if json:
        found = {name: {"about": job.about, "settings": dict(job.settings)} for name, job in RECIPES.items()}
        typer.echo(json_module.dumps(found))
        return
    for name, job in RECIPES.items():
        settings = ", ".join(f"{key}={value}" for key, value in job.settings.items())
        echo(f"{name:<18} {job.about}\n{'':<18} {settings}")
