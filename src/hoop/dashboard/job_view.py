"""What the dashboard shows of one training job, and the pure function that updates it by the job's events."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from hoop import job_events as ev
from hoop.dashboard.curve import Curve
from hoop.job_events import Observed

MAX_CHECKPOINTS = 20
MAX_SPLIT_RANKS = 512
MAX_MICROBATCHES = 1 << 16
_EMPTY = Curve()
WINDOW = 40
"""Reports (about four a second) over which the speed is measured."""


@dataclass(frozen=True)
class CheckpointView:
    """A checkpoint in the memory of the devices; parts are counted as their ranks report them."""

    step: int
    turn: int
    """How often the model was resharded before: parts of other values belong to another checkpoint."""
    parts: int
    of_parts: int
    bytes: int
    final: bool
    time: float


@dataclass(frozen=True)
class TimeSplit:
    """What one rank did in the whole run, in seconds; known when the rank has ended."""

    rank: int
    device: int
    compute: float
    communicate: float
    idle: float
    bytes_sent: int


@dataclass(frozen=True)
class JobView:
    """One job."""

    id: int
    name: str = ""
    devices: tuple[int, ...] = ()
    """In rank order."""
    status: str = ""
    """``running``, ``ended`` or ``failed``."""
    reason: str = ""
    min_devices: int = 0
    max_devices: int = 0
    strategy: str = ""
    batch_size: int = 0
    """Of the settings; 0: not known yet."""
    num_microbatches: int = 0
    """Shards of a step; 0: not known yet."""
    steps: int = 0
    """In all; 0: not known yet."""
    steps_an_epoch: int = 0
    parameters: int = 0
    done: int = 0
    """Steps done."""
    rate: float = 0.0
    """Learning rate."""
    loss: Curve = _EMPTY
    test_loss: Curve = _EMPTY
    accuracy: Curve = _EMPTY
    speed: Curve = _EMPTY
    """Steps a second, over the steps done."""
    step_seconds: Curve = _EMPTY
    progress: tuple[tuple[float, int], ...] = ()
    """Time and steps done of the last reports."""
    predicted_step_seconds: float | None = None
    shards: tuple[int, ...] = ()
    """By rank, since the last balancing; empty: as many for each."""
    stragglers: tuple[tuple[int, float], ...] = ()
    """Rank, and how many times slower it is."""
    loading: tuple[int, ...] = ()
    """Devices that load the job."""
    checkpoints: tuple[CheckpointView, ...] = ()
    recoveries: int = 0
    last_pause_s: float = 0.0
    generation: int = 0
    splits: tuple[TimeSplit, ...] = ()
    notice: str = ""
    """What the job waits for; empty: it trains."""

    @property
    def steps_a_second(self) -> float | None:
        """Over the last reports; None before the second one."""
        if len(self.progress) < 2:
            return None
        (first, then), (last, now) = self.progress[0], self.progress[-1]
        return (now - then) / (last - first) if last > first and now > then else None

    @property
    def samples_a_second(self) -> float | None:
        rate = self.steps_a_second
        return rate * self.batch_size if rate is not None and self.batch_size else None

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the last step at this speed."""
        rate = self.steps_a_second
        return (self.steps - self.done) / rate if rate and self.steps and self.status == "running" else None


def with_settings(job: JobView, settings: Mapping[str, object]) -> JobView:
    """With the settings that the job was started with, which another process wrote: types are checked."""
    batch, strategy = settings.get("batch_size"), settings.get("strategy")
    counts = [settings.get("shards"), settings.get("accumulate", 1)]
    shards = [one for one in counts if isinstance(one, int) and 0 < one < MAX_MICROBATCHES]
    return replace(
        job,
        num_microbatches=math.prod(shards) if len(shards) == len(counts) else job.num_microbatches,
        batch_size=batch if isinstance(batch, int) and batch > 0 else job.batch_size,
        strategy=str(strategy)[:80] if strategy else job.strategy,
    )


def after_event(job: JobView, observed: Observed) -> JobView:
    """The job after one of its events."""
    event = observed.event
    match event:
        case ev.Started():
            return replace(
                job,
                steps=event.steps,
                done=max(job.done, event.done),
                steps_an_epoch=event.steps_an_epoch,
                parameters=event.parameters,
                notice="",
                loading=_still_loading(job),
            )
        case ev.Steps():
            return _after_steps(job, event, observed.time)
        case ev.Evaluated():
            return _after_evaluation(job, event)
        case ev.Balanced():
            return replace(job, shards=tuple(event.shards))
        case ev.Straggler():
            others = tuple(one for one in job.stragglers if one[0] != event.straggler)
            return replace(job, stragglers=(*others, (event.straggler, event.times)) if event.slow else others)
        case ev.Recovered() | ev.Resized():
            recovered = isinstance(event, ev.Recovered)
            return replace(
                job,
                recoveries=job.recoveries + recovered,
                last_pause_s=event.pause_s,
                generation=event.generation,
                shards=(),
                stragglers=(),
                notice="",
            )
        case ev.Reassigned():
            return replace(job, generation=event.generation, devices=tuple(event.devices), loading=())
        case ev.WaitingForDevice():
            return replace(job, loading=tuple(event.waiting), notice=event.text)
        case ev.WaitingForRestart() | ev.CoordinatorLost():
            return replace(job, notice=event.text)
        case ev.CoordinatorBack():
            return replace(job, notice="")
        case ev.Ready():
            return replace(job, loading=tuple(one for one in job.loading if one != observed.device))
        case ev.SnapshotTaken():
            return replace(job, checkpoints=_with_part(job.checkpoints, event, observed.time))
        case ev.Account():
            return replace(job, splits=_with_account(job.splits, event, observed.device))
        case ev.JobEnded():
            return replace(job, notice="", loading=())
    return job


def _still_loading(job: JobView) -> tuple[int, ...]:
    """The devices that load the job while others train: one that has a rank has loaded it."""
    return tuple(one for one in job.loading if one not in job.devices)


def _after_steps(job: JobView, event: ev.Steps, time: float) -> JobView:
    """Rows of steps that were reported before are left out: after a failure another rank repeats them."""
    repeated = min(len(event.loss), max(0, job.done - event.first))
    losses, seconds = event.loss[repeated:], event.seconds[repeated:]
    if not losses:
        return job
    first, done = event.first + repeated, event.first + len(event.loss)
    progress = (*job.progress, (time, done))[-WINDOW:]
    after = replace(job, done=done, rate=event.rate, progress=progress, notice="", loading=_still_loading(job))
    speed = after.steps_a_second
    return replace(
        after,
        loss=job.loss.extended((first + 1 + at, loss) for at, loss in enumerate(losses)),
        step_seconds=job.step_seconds.extended((first + 1 + at, one) for at, one in enumerate(seconds) if one > 0),
        speed=job.speed.extended([(done, speed)]) if speed is not None else job.speed,
    )


def _after_evaluation(job: JobView, event: ev.Evaluated) -> JobView:
    known = max((*job.test_loss.x[-1:], *(one[0] for one in job.test_loss.pending)), default=-1.0)
    if event.steps <= known:  # another rank repeats it after a failure
        return job
    accuracy = job.accuracy
    if event.accuracy is not None:
        accuracy = accuracy.extended([(event.steps, event.accuracy)])
    return replace(job, test_loss=job.test_loss.extended([(event.steps, event.loss)]), accuracy=accuracy)


def _with_part(before: tuple[CheckpointView, ...], event: ev.SnapshotTaken, time: float) -> tuple[CheckpointView, ...]:
    if before and (before[-1].step, before[-1].turn) == (event.steps, event.turn):
        last = before[-1]
        parts, size = min(last.parts + 1, event.parts), last.bytes + event.bytes
        return (*before[:-1], replace(last, parts=parts, bytes=size, final=event.final, time=time))
    new = CheckpointView(event.steps, event.turn, 1, event.parts, event.bytes, event.final, time)
    return (*before, new)[-MAX_CHECKPOINTS:]


def _with_account(before: tuple[TimeSplit, ...], event: ev.Account, device: int) -> tuple[TimeSplit, ...]:
    shares = event.shares
    new = TimeSplit(
        event.rank,
        device,
        shares.get("compute", 0.0),
        shares.get("communicate", 0.0),
        shares.get("idle", 0.0),
        event.bytes_sent,
    )
    others = [one for one in before if one.rank != event.rank]
    return tuple(sorted((*others, new), key=lambda one: one.rank))[:MAX_SPLIT_RANKS]
