"""The events file of a run: what happened to its job besides the steps, one JSON object a line.

    {"done":16,"device":2,"rank":1,"time":1763.2,"kind":"fault","event":{"fault":"kill@rank=1,step=17",…}}

``done`` is the number of steps that were reported before the event. ``RunRecorder`` writes the file while a job runs,
so that a run that was killed has it too; ``hoop report`` reads it. A run that resumes appends to the file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hoop import job_events as ev
from hoop.errors import FailedPrecondition
from hoop.files import Appender
from hoop.job_events import Observed
from hoop.report import strict_json
from hoop.texts import printable_json

NAME = "events.jsonl"
LOGGED = (
    ev.Started,
    ev.RoundingDiffers,
    ev.Balanced,
    ev.Straggler,
    ev.Recovered,
    ev.Resized,
    ev.StateLoaded,
    ev.FaultInjected,
    ev.Damaged,
    ev.Hung,
    ev.Left,
    ev.Failed,
    ev.DeviceLost,
    ev.Reassigned,
    ev.Refused,
    ev.WaitingForRestart,
    ev.JobEnded,
    ev.CoordinatorLost,
    ev.CoordinatorBack,
    ev.CheckpointWritten,
    ev.Warned,
)
"""The events that are logged. Steps and evaluations are in the metrics."""


@dataclass(frozen=True)
class LoggedEvent:
    """An event of the file, and the number of steps that were reported before it."""

    observed: Observed
    done: int

    @property
    def event(self) -> ev.JobEvent:
        return self.observed.event


class RunEventLog(Appender):
    """An open events file."""

    def __init__(self, path: Path | str, *, resume: bool = False) -> None:
        """With ``resume`` the file's lines stay and an incomplete last line is ended; else the file becomes empty."""
        path = Path(path)
        if not resume:
            path.unlink(missing_ok=True)
        torn = path.exists() and not path.read_bytes().endswith(b"\n") and path.stat().st_size > 0
        super().__init__(path)
        if torn:
            self.append(b"\n")

    def log(self, observed: Observed, done: int) -> None:
        """Write the event if it is one of ``LOGGED``."""
        event = observed.event
        if not isinstance(event, LOGGED):
            return
        if isinstance(event, ev.Started):
            event = replace(event, costs=None)  # long, and no part of what happened
        fields = {name: value for name, value in event.to_fields().items() if name != "kind"}
        origin = {"device": observed.device, "rank": observed.rank, "time": observed.time}
        row = {"done": done, **origin, "kind": event.kind, "event": fields}
        self.append(strict_json.dumps(printable_json(row)).encode() + b"\n")


def read_run_events(path: Path) -> tuple[list[LoggedEvent], list[str]]:
    """The events of a file that may still grow, and a text for each line that is not one; none if there is no file."""
    found: list[LoggedEvent] = []
    problems = []
    for number, line in _complete_lines(path):
        try:
            found.append(_parse(strict_json.loads(line)))
        except (ValueError, TypeError, KeyError) as error:
            problems.append(f"{path.name}, line {number}: not an event of a job: {error}; left out")
    return found, problems


def _complete_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Bytes after the last newline are an incomplete line."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return
    except OSError as error:
        raise FailedPrecondition(f"{path}: cannot be read: {error.strerror}") from None
    yield from ((number, line) for number, line in enumerate(data.split(b"\n")[:-1], start=1) if line)


def _parse(row: Any) -> LoggedEvent:
    if not isinstance(row, dict) or not isinstance(row["event"], dict) or not isinstance(row["kind"], str):
        raise ValueError("not an object with a kind and an event")
    event = ev.from_fields(row["kind"], row["event"])
    done, time = int(row["done"]), float(row["time"])
    if not math.isfinite(time):
        raise ValueError(f"time: {time}")
    return LoggedEvent(Observed(event, int(row["rank"]), int(row["device"]), time), done)
