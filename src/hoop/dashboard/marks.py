"""Marks of the run's timeline and lines of the log, from the events of the coordinator and of jobs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from hoop import job_events as ev
from hoop.events import Event
from hoop.job_events import Observed
from hoop.texts import counted


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
    subject: str = ""
    """What it happened to, such as ``device 3``; empty: unknown."""


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
    if kind is None:
        return None
    device = event.fields.get("device")
    return Mark(event.time, kind, event.text, subject=f"device {device}" if device else event.kind)


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
            return Mark(observed.time, MarkKind.JOB, text, source, event.pause_s)
        case ev.Straggler():
            what = f"a straggler, {event.times:.1f} times slower" if event.slow else "no straggler any more"
            text = f"step {event.step}: rank {event.straggler} is {what}"
            return Mark(observed.time, MarkKind.STRAGGLER, text, source, subject=f"rank {event.straggler}")
        case ev.SnapshotTaken():
            text = f"step {event.steps}: rank {observed.rank}'s part of a checkpoint, {event.bytes:,} bytes"
            return Mark(observed.time, MarkKind.CHECKPOINT, text, source, subject=f"step {event.steps}")
        case ev.StateLoaded():
            text = f"step {event.step}: device {event.device} has its state from {event.source}"
            return Mark(observed.time, MarkKind.JOIN, text, source, subject=f"device {event.device}")
        case ev.DeviceLost() | ev.Hung():
            return Mark(observed.time, MarkKind.FAULT, describe(event), source, subject=f"device {event.device}")
        case ev.FaultInjected() | ev.Damaged() | ev.WaitingForRestart() | ev.CoordinatorLost():
            return Mark(observed.time, MarkKind.FAULT, describe(event), source)
        case ev.CoordinatorBack():
            return Mark(observed.time, MarkKind.RECOVERY, event.text, source)
        case ev.Left():
            text = f"device {observed.device} (rank {observed.rank}) handed over and left the job"
            return Mark(observed.time, MarkKind.LEAVE, text, source, subject=f"device {observed.device}")
    return None


SAME_S = 60.0
"""Marks of one kind and subject within this time are of one happening, which several processes report."""
NEAR_S = 10.0
"""A fault of an unknown subject belongs to another fault within this time: links fail because a device was lost."""


def count_happenings(marks: Sequence[Mark]) -> dict[MarkKind, int]:
    """How often each kind of thing happened. Several marks may be of one happening.

    A fault: a device that is suspect, dead, lost to a job. A recovery: the first mark of one after a fault; those
    without a fault before them are of a job that has grown. Devices that joined before the first job began are what
    the cluster began with.
    """
    counts = dict.fromkeys(reversed(MarkKind), 0)
    seen: dict[tuple[MarkKind, str], float] = {}
    last_fault, recovers = -math.inf, False
    ordered = sorted(marks, key=lambda mark: mark.time)
    first_job = next((mark.time for mark in ordered if mark.kind is MarkKind.JOB), -math.inf)
    for mark in ordered:
        key = mark.kind, mark.subject
        known = mark.time - seen.get(key, -math.inf) <= SAME_S
        seen[key] = mark.time
        match mark.kind:
            case MarkKind.FAULT:
                of_device = mark.subject.startswith("device ")
                known = known if of_device else mark.time - last_fault <= NEAR_S
                last_fault, recovers = mark.time, recovers or not known
            case MarkKind.RECOVERY:
                known, recovers = not recovers, False
            case MarkKind.JOIN:
                known = known or mark.time < first_job or not mark.subject.startswith("device ")
            case MarkKind.JOB:
                known = mark.subject not in ("job_started", "job_found")
        counts[mark.kind] += not known
    return counts


def line_of_job_event(observed: Observed, job: int) -> LogLine | None:
    """The line of an event of a job; None for the steps themselves, which are curves."""
    if isinstance(observed.event, ev.Steps):
        return None
    return LogLine(observed.time, f"job {job}", observed.event.kind, describe(observed.event, observed.rank))


def describe(event: ev.JobEvent, rank: int = 0) -> str:
    """An event of a job in a few words."""
    match event:
        case ev.Started():
            numbers = {"step": event.steps, "parameter": event.parameters, "sample": event.samples}
            return ", ".join(counted(number, thing) for thing, number in numbers.items())
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
