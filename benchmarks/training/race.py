"""Runs contenders in turns, each in a process of its own, so that noise affects all of them alike."""

from __future__ import annotations

import itertools
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


@dataclass
class Contender:
    """One way to train, and its results."""

    name: str
    arguments: list[str]
    threads: int = 1
    seconds: list[float] = field(default_factory=list)
    """Seconds per step: one value per lap, without the first lap of each process."""
    figures: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    @property
    def step(self) -> float:
        """Median over all laps, in seconds per step; NaN if there is none."""
        return statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def spread(self) -> tuple[float, float]:
        return (min(self.seconds), max(self.seconds)) if self.seconds else (float("nan"), float("nan"))

    def last(self, name: str) -> Any:
        return self.figures[-1].get(name) if self.figures else None

    def run(self, arguments: Sequence[str], timeout: float) -> None:
        """One run; a failure is recorded and does not end the race."""
        environment = os.environ | {
            "OMP_NUM_THREADS": str(self.threads),
            "MKL_NUM_THREADS": str(self.threads),
        }
        source = str(HERE.parents[1] / "src")
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [source, os.environ.get("PYTHONPATH")]))
        command = [sys.executable, str(HERE / "contender.py"), *self.arguments, *arguments]
        # A session of its own, so that its child processes can be killed with it.
        process = subprocess.Popen(
            command,
            env=environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            out, errors = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.failure = f"nothing after {timeout:.0f} s"
            return
        finally:
            if process.poll() is None:  # a timeout, or this script is terminated
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
        if process.returncode or not out.strip():
            lines = [line for line in errors.strip().splitlines() if line.strip()]
            self.failure = lines[-1].removeprefix("hoop.errors.")[:160] if lines else f"exit {process.returncode}"
            return
        figures = json.loads(out.strip().splitlines()[-1])
        self.figures.append(figures)
        laps = figures["lap_seconds"]
        self.seconds += [one / figures["steps"] for one in (laps[1:] or laps)]


def race(contenders: Sequence[Contender], repeats: int, arguments: Sequence[str], timeout: float = 600.0) -> None:
    """Run all contenders ``repeats`` times, with a line for each on stderr. SIGTERM ends it early."""

    def end(*_: object) -> None:
        raise Ended

    before = signal.signal(signal.SIGTERM, end)
    try:
        for repeat, one in itertools.product(range(repeats), contenders):
            if not one.failure:
                one.run(arguments, timeout)
                status = one.failure or f"{1000 * one.step:.2f} ms a step"
                print(f"{repeat + 1}/{repeats} {one.name}: {status}", file=sys.stderr, flush=True)
    except Ended:
        for one in contenders:
            if not one.seconds:
                one.failure = one.failure or "ended before its turn"
    finally:
        signal.signal(signal.SIGTERM, before)


class Ended(Exception):
    """SIGTERM was received."""


def environment() -> str:
    """The machine, in one line."""
    import torch

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    system = f"{platform.system()} {platform.release().split('-')[0]}"
    load = f"{os.getloadavg()[0]:.1f}"
    return (
        f"{cores} cores ({platform.machine()}), {system}, Python {platform.python_version()}, "
        f"torch {torch.__version__}, load average {load}"
    )


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def numbers(text: str) -> list[int]:
    """``1,2,4`` as a list of integers."""
    return [int(one) for one in text.split(",") if one]


def as_json(contenders: Iterable[Contender]) -> list[dict[str, Any]]:
    return [
        {
            "name": one.name,
            "step_seconds": one.step if one.seconds else None,
            "all_step_seconds": one.seconds,
            "failure": one.failure,
            **(one.figures[-1] if one.figures else {}),
        }
        for one in contenders
    ]
