"""Marks of the run's timeline and lines of the log, from the events of the coordinator and of jobs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hoop import job_events as ev
from hoop.events import Event
from hoop.job_events import Observed


class MarkKind(StrEnum):
    """Lane of the timeline. The order is that of the lanes, from below."""

    CHECKPOINT = "checkpoint"
    JOB = "job"
    LEAVE = "leave"
    JOIN = "join"
    STRAGGLER = "straggler"
    RECOVERY = "recovery"
    FAULT = "fault"


@dataclass(frozen=True)
class Mark:
    """Something that happened at a moment of the run."""

    time: float
    """Seconds since 1970, by the clock of the process that reported it."""
    kind: MarkKind
    text: str
    """What happened, how long it took and what was repeated."""
    source: str = "coordinator"
    seconds: float = 0.0
    """How long training paused; 0 where it did not or is unknown."""


@dataclass(frozen=True)
class LogLine:
    """One line of the events table."""

    time: float
    source: str
    """``coordinator`` or ``job N``."""
    kind: str
    text: str


_MARKED = {
    "device_dead": MarkKind.FAULT,
    "device_suspect": MarkKind.FAULT,
    "device_unreachable": MarkKind.FAULT,
    "links_failed": MarkKind.FAULT,
    "coordinator_failing": MarkKind.FAULT,
    "device_recovered": MarkKind.RECOVERY,
    "device_reachable": MarkKind.RECOVERY,
    "communicator_rebuilt": MarkKind.RECOVERY,
    "coordinator_started": MarkKind.JOIN,
    "device_joined": MarkKind.JOIN,
    "device_kept": MarkKind.JOIN,
    "device_draining": MarkKind.LEAVE,
    "device_left": MarkKind.LEAVE,
    "device_evicted": MarkKind.LEAVE,
    "job_started": MarkKind.JOB,
    "job_found": MarkKind.JOB,
    "job_failing": MarkKind.FAULT,
    "job_waiting_for_restart": MarkKind.FAULT,
    ev.JobEnded.kind: MarkKind.JOB,
}
"""Kinds of the coordinator's events that are marks; ``Event.kind`` is a stable name."""


def mark_of_event(event: Event) -> Mark | None:
    """The mark of an event of the coordinator; None: it is only a line of the log."""
    kind = _MARKED.get(event.kind)
    return None if kind is None else Mark(event.time, kind, event.text)


def mark_of_job_event(observed: Observed, job: int) -> Mark | None:
    """The mark of an event of a job; None: it is none."""
    source, event = f"job {job}", observed.event
    match event:
        case ev.Recovered():
            seconds = event.pause_s
            again = f"computed again: {_count(len(event.missing), 'shard')}" if event.missing else "nothing repeated"
            text = f"step {event.step}: goes on with {_count(event.ranks, 'rank')} after {_time(seconds)}; {again}"
            text += f" ({event.text})" if event.text else ""
            return Mark(observed.time, MarkKind.RECOVERY, text, source, seconds)
        case ev.Resized():
            text = f"step {event.step}: {_count(event.ranks, 'rank')} after {_time(event.pause_s)}; nothing repeated"
            return Mark(observed.time, MarkKind.RECOVERY, text, source, event.pause_s)
        case ev.Straggler():
            what = f"a straggler, {event.times:.1f} times slower" if event.slow else "no straggler any more"
            text = f"step {event.step}: rank {event.straggler} is {what}"
            return Mark(observed.time, MarkKind.STRAGGLER, text, source)
        case ev.SnapshotTaken():
            text = f"step {event.steps}: rank {observed.rank}'s part of a checkpoint, {event.bytes:,} bytes"
            return Mark(observed.time, MarkKind.CHECKPOINT, text, source)
        case ev.StateLoaded():
            text = f"step {event.step}: device {event.device} has its state from {event.source}"
            return Mark(observed.time, MarkKind.JOIN, text, source)
        case ev.FaultInjected() | ev.DeviceLost() | ev.Damaged() | ev.WaitingForRestart() | ev.CoordinatorLost():
            return Mark(observed.time, MarkKind.FAULT, describe(event), source)
        case ev.CoordinatorBack():
            return Mark(observed.time, MarkKind.RECOVERY, event.text, source)
        case ev.Left():
            text = f"device {observed.device} (rank {observed.rank}) handed over and left the job"
            return Mark(observed.time, MarkKind.LEAVE, text, source)
    return None


def line_of_job_event(observed: Observed, job: int) -> LogLine | None:
    """The line of an event of a job; None for the steps themselves, which are curves."""
    if isinstance(observed.event, ev.Steps):
        return None
    return LogLine(observed.time, f"job {job}", observed.event.kind, describe(observed.event, observed.rank))


def describe(event: ev.JobEvent, rank: int = 0) -> str:
    """An event of a job in a few words."""
    match event:
        case ev.Started():
            return f"{event.steps} steps, {event.parameters:,} parameters, {event.samples:,} samples"
        case ev.Evaluated():
            accuracy = f", accuracy {event.accuracy:.2%}" if event.accuracy is not None else ""
            return f"step {event.steps}: loss {event.loss:.4f}{accuracy} ({event.split})"
        case ev.Balanced():
            return f"step {event.step}: shards by rank {' '.join(map(str, event.shards))}"
        case ev.Recovered() | ev.Resized():
            return f"step {event.step}: {_count(event.ranks, 'rank')} after {_time(event.pause_s)} {event.text}".strip()
        case ev.Straggler():
            return f"step {event.step}: rank {event.straggler} {'slow' if event.slow else 'no longer slow'}"
        case ev.StateLoaded():
            return f"step {event.step}: device {event.device} has its state from {event.source}"
        case ev.SnapshotTaken():
            return f"step {event.steps}: {event.bytes:,} bytes of rank {rank}"
        case ev.FaultInjected():
            return f"step {event.step}: {event.fault}, as asked"
        case ev.DeviceLost():
            return f"device {event.device} was lost: {event.text}"
        case ev.Reassigned():
            return f"generation {event.generation}: devices {' '.join(map(str, event.devices))} in rank order"
        case ev.Account():
            return f"rank {event.rank}: {event.instructions:,} instructions, {event.bytes_sent:,} bytes sent"
        case ev.JobEnded():
            return f"{event.error}: {event.text}" if event.error else "the job has ended"
    return str(getattr(event, "text", ""))


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.0f} s"
