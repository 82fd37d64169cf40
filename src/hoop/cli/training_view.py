"""What ``hoop train`` shows: a line of progress that lives, or lines for a log; and a summary that stays."""

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

from hoop.config import format_size

LINE_S = 10.0
"""Without a terminal, a line at least so often."""
WINDOW = 40
"""Notes of progress over which speed is measured."""


class PlainView:
    """For scripts: nothing."""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def say(self, text: str) -> None:
        pass

    def note(self, event: dict[str, Any]) -> None:
        if event["kind"] == "warning":
            typer.echo(f"warning: {event['text']}", err=True)

    def summary(self, result: dict[str, Any], out: Path | None) -> None:
        pass


class View(PlainView):
    """For people."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True, highlight=False)
        self._live = self._console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(compact=True),
            console=self._console,
            transient=True,
        )
        self._task = self._progress.add_task("", total=None, figures="")
        self._started: dict[str, Any] = {}
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
            self._progress.update(self._task, figures=text)
        else:
            self._console.print(text)

    def note(self, event: dict[str, Any]) -> None:
        match event["kind"]:
            case "started":
                self._start(event)
            case "steps":
                self._advance(event)
            case "evaluated":
                self._evaluated(event)
            case "warning":
                self._console.print(f"warning: {event['text']}")
            case "lost":
                self._console.print(f"device {event['device']} was lost: {event['text']}")
            case "straggler":
                slow = (
                    f"is a straggler, {event['times']:.1f} times slower than the others: it gets fewer shards"
                )
                what = slow if event["slow"] else "is no straggler any more"
                self._console.print(f"step {event['step']}: rank {event['straggler']} {what}")
            case "fault":
                self._console.print(f"step {event['step']}: {event['fault']}, as asked")
            case "damaged":
                self._console.print(f"damaged on the way, and sent again: {event['text']}")
            case "away" | "back" | "scattered" | "refused":
                self._console.print(event["text"])
            case "state":
                self._console.print(
                    f"step {event['step']}: device {event['device']} has its state from {event['source']}"
                )
            case "moved":
                self._started["devices"] = event["ranks"]
                self._console.print(f"step {event['step']}: goes on with {_devices(event['ranks'])}")
            case "recovered":
                self._started["devices"] = event["ranks"]
                self._console.print(
                    f"step {event['step']}: goes on with {_devices(event['ranks'])}, {event['pause_s']:.1f} s later"
                )

    def _start(self, event: dict[str, Any]) -> None:
        self._started = event
        self._marks.append((time.monotonic(), event["done"]))
        self._printed = time.monotonic()
        self._progress.reset(
            self._task, total=event["steps"], completed=event["done"], figures="", description="epoch 1"
        )
        after = f", after step {event['done']}" if event["done"] else ""
        lines = [
            f"{event['parameters']:,} parameters on {_devices(event['devices'])}",
            f"{event['steps']} steps{after}",
            f"first step after {event['start_seconds']:.1f} s",
        ]
        self._console.print(" · ".join(lines))
        if len(event["stages"]) > 1:
            for stage, where in enumerate(event["stages"]):
                self._console.print(f"  stage {stage}: {where}")

    def _advance(self, event: dict[str, Any]) -> None:
        done = event["first"] + len(event["loss"])
        self._losses += event["loss"]
        self._marks.append((time.monotonic(), done))
        an_epoch, steps = self._started["steps_an_epoch"], self._started["steps"]
        epoch = f"epoch {(done - 1) // an_epoch + 1}/{-(-steps // an_epoch)}"
        loss = sum(event["loss"]) / len(event["loss"])
        figures = [f"step {done}/{steps}", f"loss {loss:.4f}", self._accuracy, self._speed()]
        figures.append(_devices(self._started["devices"]))
        text = " · ".join(filter(None, figures))
        self._progress.update(self._task, completed=done, description=epoch, figures=text)
        if not self._live and time.monotonic() - self._printed > LINE_S:
            self._printed = time.monotonic()
            self._console.print(f"{epoch} · {text}{self._left(done)}")

    def _speed(self) -> str:
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        speed = (now - then) * self._started["batch_size"] / (last - first) if last > first else 0
        return f"{speed:,.0f} samples/s" if speed else ""

    def _left(self, done: int) -> str:
        (first, then), (last, now) = self._marks[0], self._marks[-1]
        return (
            f" · {(self._started['steps'] - done) * (last - first) / (now - then):.0f} s left"
            if now > then
            else ""
        )

    def _evaluated(self, event: dict[str, Any]) -> None:
        self._accuracy = f"{_accuracy(event['split'])} {event['accuracy']:.2%}"
        self._printed = time.monotonic()
        trained = f"loss {sum(self._losses) / len(self._losses):.4f}  " if self._losses else ""
        self._losses = []
        self._console.print(
            f"epoch {event['epoch']:>3}  {trained}{'test' if event['split'] == 'test' else 'training'} loss "
            f"{event['loss']:.4f}  {self._accuracy}  {self._speed()}"
        )

    def summary(self, result: dict[str, Any], out: Path | None) -> None:
        """What came of it, in a few lines on standard output."""
        measured = result.get("accuracy") is not None
        accuracy = f"{_accuracy(result['split'])} {result['accuracy']:.2%}  " if measured else ""
        stopped = f"stopped after {result['steps']}" if result["stopped"] else f"{result['steps']}"
        typer.echo(
            f"{accuracy}{stopped} steps in {result['seconds']:.1f} s  "
            f"{result['samples_per_second']:,.0f} samples/s  {_devices(result['devices'])}, {result['strategy']}"
        )
        for rank, (one, memory) in enumerate(zip(result["shares"], result["memory"], strict=True)):
            typer.echo(
                f"  device {rank}: compute {one['compute']:.0%}  communication {one['communicate']:.0%}  "
                f"idle {one['idle']:.0%}  memory {format_size(memory)}"
            )
        moved = result.get("shards_moved")
        rebalanced = f"; shards followed the devices' speed {moved} times" if moved else ""
        typer.echo(f"  moved {format_size(result['bytes_sent'])} between devices{rebalanced}")
        if result.get("stragglers"):
            slow = ", ".join(
                f"rank {one['rank']} from step {one['step']} on, {one['times']:.1f} times slower"
                for one in result["stragglers"]
            )
            typer.echo(f"  stragglers: {slow}")
        for one in result.get("states", ()):
            typer.echo(f"  device {one['device']} came at step {one['step']}; state: from {one['source']}")
        if result.get("damaged"):
            typer.echo(f"  messages damaged on the way and sent again: {result['damaged']}")
        if result.get("prediction_error") is not None:
            error = result["prediction_error"]
            typer.echo(
                f"  a step took {1e3 * result['step_seconds']:.2f} ms (median); the simulator predicted "
                f"{1e3 * result['predicted_step_seconds']:.2f} ms: {abs(error):.0%} {'more' if error > 0 else 'less'}"
            )
        typer.echo(f"  weights sha256 {result['weights_sha256']}")
        if out is not None:
            again = f"; go on: hoop train --resume --out {out}" if result["stopped"] else ""
            typer.echo(f"  kept in {out}{again}")
        elif result["stopped"]:
            typer.echo("  nothing was kept: no --out was given")


def _accuracy(split: str) -> str:
    """What an accuracy on these samples is called: that of the training data never passes for the test data's."""
    return "accuracy" if split == "test" else "training accuracy"


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
        typer.echo(f"{name:<18} {job.about}\n{'':<18} {settings}")
