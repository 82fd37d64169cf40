"""What goes into the state machine, and what comes out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hoop.topology import DeviceInfo

# ---- in: what happened


@dataclass(frozen=True)
class Joined:
    """A device asks to be a member; ``device_id`` 0 asks for a new id."""

    info: DeviceInfo
    now: float


@dataclass(frozen=True)
class Heartbeat:
    """A heartbeat came."""

    device_id: int
    incarnation: str
    now: float


@dataclass(frozen=True)
class CallReported:
    """A call to a device ended; ``failure`` says why it could not be made, or nothing."""

    device_id: int
    failure: str
    now: float


@dataclass(frozen=True)
class LinkClosed:
    """A device's heartbeat stream broke off."""

    device_id: int
    incarnation: str


@dataclass(frozen=True)
class Probed:
    """A suspect was asked directly; ``failure`` says why it cannot be reached, or nothing."""

    device_id: int
    incarnation: str
    failure: str


@dataclass(frozen=True)
class Left:
    """A device said goodbye."""

    device_id: int
    incarnation: str


@dataclass(frozen=True)
class Excused:
    """These devices may be silent until then, and for a lease after."""

    device_ids: tuple[int, ...]
    until: float


@dataclass(frozen=True)
class Tick:
    """Time passed."""

    now: float


@dataclass(frozen=True)
class Complained:
    """A member says that its link to another has failed, at a generation of their communicator."""

    communicator_id: int
    generation: int
    device_id: int
    peer_id: int
    now: float


@dataclass(frozen=True)
class LinkWorked:
    """The members of a generation have all reached each other."""

    communicator_id: int
    generation: int


@dataclass(frozen=True)
class Readmitted:
    """A device that was evicted because of its links may take part again at once."""

    communicator_id: int
    device_id: int


@dataclass(frozen=True)
class Created:
    """A communicator of these devices, in rank order."""

    device_ids: tuple[int, ...]
    most: int = 0
    """How many there may be in all; 0: the default."""


@dataclass(frozen=True)
class Rebuilt:
    """The same communicator, of those of its members that are alive and stay, and of whoever joins it.

    ``planned``: what the generation before does goes on, until its members move by themselves.
    """

    communicator_id: int
    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    planned: bool = False


@dataclass(frozen=True)
class Started:
    """Work was given to a communicator."""

    communicator_id: int


@dataclass(frozen=True)
class Finished:
    """Work at this generation ended; ``failure`` says why it failed, or nothing."""

    communicator_id: int
    generation: int
    failure: str = ""


@dataclass(frozen=True)
class Finalized:
    """A communicator takes no more work."""

    communicator_id: int


@dataclass(frozen=True)
class Destroyed:
    """A communicator is forgotten."""

    communicator_id: int


@dataclass(frozen=True)
class JobStarted:
    """A job runs on the communicator with its id."""

    job_id: int
    settings: str
    run: str = ""


@dataclass(frozen=True)
class JobEnded:
    """A job is over, and its communicator with it; ``error`` and ``text`` say how it failed, if it did."""

    job_id: int
    error: str = ""
    text: str = ""


MembershipEvent = (
    Joined
    | Heartbeat
    | CallReported
    | LinkClosed
    | Probed
    | Left
    | Excused
    | Tick
    | Complained
    | LinkWorked
    | Readmitted
    | Created
    | Rebuilt
    | Started
    | Finished
    | Finalized
    | Destroyed
    | JobStarted
    | JobEnded
)

# ---- out: what is to be done


@dataclass(frozen=True)
class Announce:
    """Publish an event."""

    kind: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """Write this to the journal before anything is answered."""

    entry: Mapping[str, object]


@dataclass(frozen=True)
class Probe:
    """Ask this device directly whether it lives."""

    device_id: int


@dataclass(frozen=True)
class Stop:
    """Abort what this communicator is doing at this generation."""

    communicator_id: int
    generation: int
    reason: str
    members: tuple[int, ...]
    lost_device: int = 0
    """Whose death it is about, if it is about one."""


MembershipInstruction = Announce | Record | Probe | Stop
