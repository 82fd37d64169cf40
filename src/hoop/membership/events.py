"""Events and instructions of the membership state machine (``state_machine.step``).

The coordinator turns each RPC, probe result and timer tick into one event. ``step`` returns instructions, which the
coordinator carries out. Times (``now``, ``until``) are seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hoop.membership.state import CommunicatorState, Connection, Member, State
from hoop.topology import DeviceInfo

# ---- events


@dataclass(frozen=True)
class Joined:
    """A device asks to become a member. ``info.device_id`` 0 asks for a new id."""

    info: DeviceInfo
    now: float


@dataclass(frozen=True)
class Heartbeat:
    """The coordinator received a heartbeat."""

    device_id: int
    incarnation: str
    now: float


@dataclass(frozen=True)
class CallReported:
    """The coordinator called a device. ``failure``: why the device could not be reached; empty if it answered."""

    device_id: int
    failure: str
    now: float


@dataclass(frozen=True)
class LinkClosed:
    """A device's heartbeat stream ended."""

    device_id: int
    incarnation: str


@dataclass(frozen=True)
class Probed:
    """The coordinator looked after a device: at its process, where it can see it, else by connecting to its server."""

    device_id: int
    incarnation: str
    failure: str
    """Why its process must have ended; empty: it may live."""
    runs_at: float = 0.0
    """Time at which its process was running; 0: it was not seen to run. A stopped process accepts connections too, but
    does not answer."""
    by_answer: bool = False
    """Whether it was seen by an answer at its address, which may be another process's, and not by its kernel."""
    witness: int = 0
    """Id of the other device that got the answer; 0: the coordinator itself did."""


@dataclass(frozen=True)
class Left:
    """A device left the cluster on purpose."""

    device_id: int
    incarnation: str


@dataclass(frozen=True)
class Drained:
    """A device begins to drain: it gets no new communicator and no new job. ``draining`` False: the drain is over."""

    device_id: int
    draining: bool = True


@dataclass(frozen=True)
class HeartbeatSuspended:
    """These devices may send no heartbeat before ``until``. Their lease begins then."""

    device_ids: tuple[int, ...]
    until: float


@dataclass(frozen=True)
class Tick:
    """Time passed; the coordinator sends one every heartbeat interval."""

    now: float


@dataclass(frozen=True)
class LinksChecked:
    """Connections to and from a device were tried. ``results``: why each one failed; empty if it worked."""

    device_id: int
    incarnation: str
    results: Mapping[Connection, str]


@dataclass(frozen=True)
class LinkFailureReported:
    """Device ``device_id`` reports that its link to ``peer_id`` failed, at a generation of their communicator."""

    communicator_id: int
    generation: int
    device_id: int
    peer_id: int
    now: float


@dataclass(frozen=True)
class LinkWorked:
    """All members of a generation have exchanged data with each other."""

    communicator_id: int
    generation: int


@dataclass(frozen=True)
class Readmitted:
    """End the eviction of a device now. Evicted devices are those whose links failed again over new connections."""

    communicator_id: int
    device_id: int


@dataclass(frozen=True)
class Created:
    """Create a communicator of these devices, in rank order."""

    device_ids: tuple[int, ...]
    limit: int = 0
    """Maximum number of communicators that may exist at once; 0: the default."""


@dataclass(frozen=True)
class Rebuilt:
    """Begin the next generation of a communicator: its usable members, plus ``joining``, minus ``leaving``.

    ``planned``: the previous generation keeps running. Its members move to the new one by themselves.
    """

    communicator_id: int
    joining: tuple[int, ...] = ()
    leaving: tuple[int, ...] = ()
    planned: bool = False


@dataclass(frozen=True)
class Started:
    """An operation was submitted to a communicator."""

    communicator_id: int


@dataclass(frozen=True)
class Finished:
    """An operation of this generation ended. ``failure``: why it failed; empty if it succeeded."""

    communicator_id: int
    generation: int
    failure: str = ""


@dataclass(frozen=True)
class Finalized:
    """A communicator accepts no more operations."""

    communicator_id: int


@dataclass(frozen=True)
class Destroyed:
    """Remove a communicator."""

    communicator_id: int


@dataclass(frozen=True)
class JobStarted:
    """A job runs on the communicator that has the same id."""

    job_id: int
    settings: str
    run: str = ""


@dataclass(frozen=True)
class JobEnded:
    """A job ended, and its communicator with it. ``error`` (class) and ``text`` describe its failure, if it failed."""

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
    | Drained
    | HeartbeatSuspended
    | Tick
    | LinksChecked
    | LinkFailureReported
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

# ---- instructions


@dataclass(frozen=True)
class Announce:
    """Publish an event in the coordinator's event log."""

    kind: str
    text: str
    fields: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """Write this entry to the journal before the coordinator answers the caller."""

    entry: Mapping[str, object]


@dataclass(frozen=True)
class Probe:
    """Find out whether the process of this device lives and runs."""

    device_id: int
    witnesses: tuple[int, ...] = ()
    """Other devices to ask whether its server answers them, if the coordinator itself sees no sign of it."""


@dataclass(frozen=True)
class Stop:
    """Abort the operations of a communicator at this generation, on all ``members``."""

    communicator_id: int
    generation: int
    reason: str
    members: tuple[int, ...]
    lost_device: int = 0
    """Id of the lost device that caused the abort; 0: none."""


MembershipInstruction = Announce | Record | Probe | Stop
Result = tuple[State, tuple[MembershipInstruction, ...]]
"""The state after an event, and the instructions that follow from it."""


def device_event(kind: str, member: Member, what: str) -> Announce:
    """The event of a change of one device."""
    return Announce(kind, f"{member.info} {what}", {"device": member.info.device_id})


def communicator_event(kind: str, one: CommunicatorState, what: str) -> Announce:
    """The event of a change of one communicator; its text names the last word of ``kind``."""
    fields = {"communicator": one.id, "generation": one.generation}
    return Announce(kind, f"communicator {one.id} {kind.split('_')[1]} {what}".rstrip(), fields)


def records_first(
    record: Record, news: Announce, broken: tuple[MembershipInstruction, ...]
) -> tuple[MembershipInstruction, ...]:
    """Orders the instructions: records of broken communicators first, then the device's record, then the rest.

    A journal cut between them must not show a lost device in a communicator that is not broken.
    """
    records = tuple(one for one in broken if isinstance(one, Record))
    return (*records, record, news, *(one for one in broken if not isinstance(one, Record)))
