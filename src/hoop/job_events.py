"""The events of a training job, one dataclass a kind: what devices, the coordinator and the client report about it.

    device ── WatchTask ──▶ coordinator ── WatchJob ──▶ client ──▶ command line, files, ``hoop.train(progress=…)``

An event travels as its ``kind`` and a JSON object of its fields. ``to_fields`` and ``from_fields`` convert it; a field
that this version does not know is ignored, a missing one without a default is a ``ValueError``. Decisions are made on
the class of an event, never on the text of its kind. ``Observed`` is an event with its origin, as a client receives
it; ``hoop.train(progress=…)`` gets its ``to_fields``.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Self

from hoop.texts import parse_json


@dataclass(frozen=True)
class JobEvent:
    """One event of a job."""

    kind: ClassVar[str]

    def to_fields(self) -> dict[str, Any]:
        """The fields and ``kind``; the values are this event's own, not copies."""
        return {"kind": self.kind} | {one.name: getattr(self, one.name) for one in dataclasses.fields(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_fields())

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        """Raises ValueError if a field without a default is missing."""
        known = {one.name for one in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in fields.items() if name in known})
        except TypeError:
            raise ValueError(
                f"job event {cls.kind!r}: a field is missing; it has {', '.join(sorted(fields)) or 'none'}"
            ) from None


# ---- from a device: a rank's training


@dataclass(frozen=True)
class Loaded(JobEvent):
    """The device has loaded PyTorch, the job's code and its data."""

    kind = "loaded"


@dataclass(frozen=True)
class Ready(JobEvent):
    """A device that joins a running job can take a rank."""

    kind = "ready"
    seconds: float = 0.0
    data: str | None = None
    """Fingerprint of the device's dataset, compared with the other devices'; None where the device had a rank
    before."""
    about: str = ""
    """Description of the dataset in words."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and arithmetic of the device (``hoop.environment``), compared with the other devices'."""


@dataclass(frozen=True)
class Started(JobEvent):
    """Training begins. Emitted by the reporting rank, again after a recovery before the first reported step."""

    kind = "started"
    steps: int
    """Number of steps of the whole run."""
    done: int
    """Number of steps done before: those of the checkpoint that the run resumes from."""
    steps_an_epoch: int
    samples: int
    parameters: int
    stages: list[str]
    """Blocks of each stage, and the ranks that hold them, in words."""
    seconds: float
    """Seconds since the job was started."""
    data: str
    """Checksum of the training data."""
    same: str
    """Fingerprint of the dataset, which all devices must share."""
    environment: dict[str, str] = field(default_factory=dict)
    """Versions and arithmetic of the job's ranks; empty: devices that differ may take part."""
    costs: dict[str, Any] | None = None
    """Measured costs of a step, from which its time is predicted."""
    sharded_update: bool = False
    """Data parallel: True if the ranks shard the update. A device that joins must know it."""
    devices: int = 0
    """Number of devices that the job began with; the client that follows the job fills this in, and ``batch_size``."""
    batch_size: int = 0


@dataclass(frozen=True)
class RoundingDiffers(JobEvent):
    """Some devices compute other bits than the others; ``text`` names them and says what follows."""

    kind = "rounding_differs"
    text: str


@dataclass(frozen=True)
class Steps(JobEvent):
    """Steps that were done since the last such event, about four times a second."""

    kind = "steps"
    first: int
    """Number of steps done before these."""
    loss: list[float]
    seconds: list[float]
    rate: float
    """Learning rate of the last of these steps."""
    fed: list[Any]
    """Provenance of each step: devices by shard and fingerprints of samples, or None."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Further metrics of each step that the loss function returned, by name."""


@dataclass(frozen=True)
class Evaluated(JobEvent):
    """The model was evaluated after ``steps`` steps on the samples of ``split``."""

    kind = "evaluated"
    steps: int
    epoch: int
    loss: float
    accuracy: float | None
    """Fraction of correct answers; None if the outputs are not those of a classification, and the loss returns no
    metric of this name."""
    split: str
    metrics: dict[str, float] = field(default_factory=dict)
    """Further metrics that the loss function returned, by name."""
    best: bool = False
    """True if no earlier evaluation was better (settings ``monitor``, ``monitor_mode``)."""


@dataclass(frozen=True)
class Balanced(JobEvent):
    """From this step on each rank computes this number of shards."""

    kind = "balanced"
    step: int
    shards: list[int]


@dataclass(frozen=True)
class Straggler(JobEvent):
    """A rank has become a straggler, or is one no more."""

    kind = "straggler"
    step: int
    straggler: int
    slow: bool
    times: float
    """Ratio of the seconds that a shard takes at this rank and at the other ranks."""


@dataclass(frozen=True)
class Recovered(JobEvent):
    """The ranks went on at ``step`` after a failure."""

    kind = "recovered"
    step: int
    pause_s: float
    text: str
    missing: list[int]
    """Numbers of the step's shards that were computed again."""
    ranks: int
    generation: int
    sharded_update: bool = False
    """See ``Started``."""


@dataclass(frozen=True)
class Resized(JobEvent):
    """The ranks went on at ``step`` after a device joined or left on notice: nothing was lost."""

    kind = "resized"
    step: int
    pause_s: float
    text: str
    missing: list[int]
    ranks: int
    generation: int
    sharded_update: bool = False
    """See ``Started``."""


@dataclass(frozen=True)
class StateLoaded(JobEvent):
    """A device that had no state has it at ``step``, from its own arena or from another device."""

    kind = "state"
    step: int
    device: int
    source: str


@dataclass(frozen=True)
class FaultInjected(JobEvent):
    """A placed fault happens now."""

    kind = "fault"
    fault: str
    step: int = 0
    before: str = ""
    """Name of the instruction before which the fault happens; empty: the fault is not in a rank."""


@dataclass(frozen=True)
class SnapshotTaken(JobEvent):
    """One rank's part of a checkpoint is in a buffer of its device."""

    kind = "snapshot"
    steps: int
    final: bool
    parts: int
    """Number of parts of which the checkpoint consists."""
    turn: int
    """Number of times that the model was resharded before: parts with other values do not belong together."""
    buffer: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Account(JobEvent):
    """What one rank did in the whole run."""

    kind = "account"
    rank: int
    seconds: float
    shares: dict[str, float]
    """Seconds that the rank spent on each kind of work."""
    instructions: int
    """Number of instructions executed."""
    bytes_sent: int
    memory: int
    spans: list[Any]
    """Instructions of the first steps: name, category, start and duration in seconds."""
    done: int
    stopped: bool


# ---- from a device: its task


@dataclass(frozen=True)
class Waiting(JobEvent):
    """The task has no usable links and waits for a rank in a newer generation."""

    kind = "waiting"
    generation: int
    failed: int = 0
    """Id of the device to which a link failed, or 0."""
    lacks: str = ""
    """Text that says which state or memory the ranks of this generation lack, so that they could not go on."""
    error: str = ""
    """Name of the error class for ``lacks``."""
    text: str = ""


@dataclass(frozen=True)
class Damaged(JobEvent):
    """A message did not arrive as it was sent; it is sent again."""

    kind = "damaged"
    text: str


@dataclass(frozen=True)
class Hung(JobEvent):
    """A device makes no progress and waits for nobody. It is replaced if others can go on without it."""

    kind = "hung"
    device: int
    step: int
    seconds: float
    """Seconds without progress."""
    limit_s: float
    """Seconds without progress after which it is replaced."""
    text: str
    """Function, file and line in which it is, and its stack."""
    generation: int = 0

    @property
    def over(self) -> bool:
        """Whether the limit is over; before that the event is a warning."""
        return self.seconds >= self.limit_s


@dataclass(frozen=True)
class Ended(JobEvent):
    """The task came to the end of the training. Last event of a task."""

    kind = "ended"


@dataclass(frozen=True)
class Left(JobEvent):
    """The task handed over and left the job. Last event of a task."""

    kind = "left"
    text: str = ""


@dataclass(frozen=True)
class Failed(JobEvent):
    """The task failed. Last event of a task."""

    kind = "failed"
    error: str
    """Name of the error class."""
    text: str


# ---- from the coordinator


@dataclass(frozen=True)
class DeviceLost(JobEvent):
    """A device of the job is gone."""

    kind = "lost"
    device: int
    text: str = ""


@dataclass(frozen=True)
class Reassigned(JobEvent):
    """These devices, in rank order, have ranks of a new generation."""

    kind = "reassigned"
    generation: int
    devices: list[int]
    left_out: dict[str, str] = field(default_factory=dict)
    """Devices that had a rank before and were lost or evicted: by id, the device and why."""


@dataclass(frozen=True)
class Refused(JobEvent):
    """A device cannot take part; ``text`` says why and what to do."""

    kind = "refused"
    device: int
    text: str


@dataclass(frozen=True)
class WaitingForRestart(JobEvent):
    """No device is left that has the state: the job waits for these to come back."""

    kind = "waiting_for_restart"
    waiting: list[int]
    seconds: float
    text: str


@dataclass(frozen=True)
class WaitingForDevice(JobEvent):
    """The job, or a device that leaves it, waits for devices that are loading it; repeated while they do."""

    kind = "waiting_for_device"
    waiting: list[int]
    seconds: float
    """Seconds since the first of them began to load."""
    text: str


@dataclass(frozen=True)
class JobEnded(JobEvent):
    """The job is over. Last event of a job; ``error`` names the class of the error it failed with, or is empty."""

    kind = "job_ended"
    error: str = ""
    text: str = ""


# ---- from the client that follows the job


@dataclass(frozen=True)
class CoordinatorLost(JobEvent):
    """The coordinator cannot be reached; the job goes on without it."""

    kind = "coordinator_lost"
    text: str


@dataclass(frozen=True)
class CoordinatorBack(JobEvent):
    """The coordinator answers again."""

    kind = "coordinator_back"
    text: str


@dataclass(frozen=True)
class Attached(JobEvent):
    """A client follows a job that it did not start."""

    kind = "attached"
    job: int
    name: str
    status: str


@dataclass(frozen=True)
class CheckpointWritten(JobEvent):
    """A checkpoint is on the disk."""

    kind = "checkpoint"
    steps: int
    file: str
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Warned(JobEvent):
    """Something could not be written, was passed over or was not reported; training goes on."""

    kind = "warning"
    text: str
    file: str = ""


@dataclass(frozen=True)
class Finished(JobEvent):
    """The run's result; ``result`` has the keys of ``result.json``."""

    kind = "result"
    result: dict[str, Any] = field(default_factory=dict)

    def to_fields(self) -> dict[str, Any]:
        return {"kind": self.kind, **self.result}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Self:
        return cls({name: value for name, value in fields.items() if name not in ("kind", "rank", "time")})


KINDS: dict[str, type[JobEvent]] = {one.kind: one for one in JobEvent.__subclasses__()}

TASK_ENDS = (Ended, Left, Failed)
"""Kinds of events after which a task emits nothing."""


def from_fields(kind: str, fields: Mapping[str, Any]) -> JobEvent:
    """The event of this kind; ValueError if the kind is unknown or a field is missing."""
    if kind not in KINDS:
        raise ValueError(f"job event of unknown kind {kind!r}")
    return KINDS[kind].from_fields(fields)


def from_json(kind: str, text: str) -> JobEvent:
    """``from_fields`` of a JSON object; ValueError if ``text`` is none."""
    fields = parse_json(text)
    if not isinstance(fields, dict):
        raise ValueError(f"job event {kind!r} is not a JSON object")
    return from_fields(kind, fields)


Emit = Callable[[JobEvent], None]
"""Function that emits an event; a rank gets it from its device."""


@dataclass(frozen=True)
class Observed:
    """An event as a client receives it. ``rank`` and ``device`` are 0 where no device emitted it."""

    event: JobEvent
    rank: int = 0
    device: int = 0
    time: float = field(default_factory=time.time)
    """Seconds since 1970, by the clock of the process that emitted the event."""
    sequence: int = 0

    def to_fields(self) -> dict[str, Any]:
        """For ``progress=`` callbacks and JSON: the event's fields, ``kind``, ``rank`` and ``time``."""
        return {"rank": self.rank, "time": self.time} | self.event.to_fields()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> Observed:
        return cls(from_fields(fields["kind"], fields), rank=fields["rank"], time=fields["time"])
