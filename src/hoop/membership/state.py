"""The coordinator's membership state: devices, communicators, jobs and link faults. Immutable; no derived data.

``state_machine.step`` replaces it with every event. The journal stores all of it but heartbeats and link faults.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from hoop.errors import NotFound
from hoop.membership.fast_replace import replace
from hoop.membership.heartbeats import PUNCTUAL, DetectorConfig, HeartbeatHistory, ObserverHealth
from hoop.topology import DeviceInfo

MAX_RELINKS = 3
"""Maximum number of times that a pair of devices gets new links within ``RELINK_WINDOW_S``."""
RELINK_WINDOW_S = 60.0
"""Seconds in which ``MAX_RELINKS`` are counted. The first eviction of a device lasts as long."""

Pair = tuple[int, int]
"""Two device ids, the lower first."""


@dataclass(frozen=True)
class LinkFaults:
    """Reported link faults of one communicator. ``state_machine`` holds the rules."""

    generation: int = 0
    """Generation in which the links of ``complaints`` failed."""
    complaints: frozenset[tuple[int, int]] = frozenset()
    """Pairs (reporting device, peer that it cannot reach)."""
    first_complaint_at: float = 0.0
    decided_generation: int = 0
    """Newest generation on whose complaints the state machine has decided; it has for all earlier ones."""
    working_generation: int = 0
    """Newest generation in which all members have reached each other."""
    relinked: tuple[tuple[Pair, int, float], ...] = ()
    """Pairs that got new links, each with the generation whose link failed and the time."""
    evicted_until: Mapping[int, float] = field(default_factory=dict)
    """Time at which the eviction of each evicted device ends."""
    eviction_counts: Mapping[int, int] = field(default_factory=dict)
    """Number of evictions of each device so far."""

    def failed_again(self, pair: Pair, now: float) -> bool:
        """Whether new links did not help this pair, or only for a short time and too often."""
        generations = [
            generation for one, generation, when in self.relinked if one == pair and now - when < RELINK_WINDOW_S
        ]
        return bool(generations) and (generations[-1] >= self.working_generation or len(generations) >= MAX_RELINKS)


NO_LINK_FAULTS = LinkFaults()
COORDINATOR = 0
"""Source of the coordinator's own connections; no device has this id."""


class Connection(NamedTuple):
    """A connection that one device would make to another."""

    source: int
    """Id of the connecting device, or ``COORDINATOR``."""
    target: int
    data: bool = True
    """True for the target's data port; False for its services."""


class Health(StrEnum):
    """A device's health.

    alive ──▶ suspect ──▶ dead        suspect: a link or a call failed, and the coordinator probes it
      ▲──────────┘          │         dead: its process has ended, is silent and not seen to run, or fails all calls
      ▲─────────────────────┘         it may join again, as a new incarnation or after a stall
    left: it left on purpose
    """

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


_USABLE = (Health.ALIVE, Health.SUSPECT)


class OperationOutcome(StrEnum):
    """The outcome of a communicator's latest operation."""

    IN_PROGRESS = "in_progress"
    """The operation runs, or no operation has run yet."""
    SUCCESS = "success"
    FAILED = "failed"


@dataclass(frozen=True)
class Member:
    """One device, as the coordinator sees it."""

    info: DeviceInfo
    heartbeats: HeartbeatHistory
    health: Health = Health.ALIVE
    reason: str = ""
    ended: bool = False
    """True if the device's process is known to have ended, and its memory is gone. Other dead devices may only be
    silent."""
    draining: bool = False
    """True while the device hands over its work and leaves. The journal does not store it: a drain ends with its
    coordinator."""

    @property
    def usable(self) -> bool:
        return self.health in _USABLE

    @property
    def available(self) -> bool:
        """Whether it can get new work."""
        return self.usable and not self.draining


@dataclass(frozen=True)
class CommunicatorState:
    """One communicator: its members in rank order, at one generation."""

    id: int
    members: tuple[int, ...]
    generation: int = 1
    outcome: OperationOutcome = OperationOutcome.IN_PROGRESS
    reason: str = ""
    broken_by: int = 0
    """Id of the lost device that broke this generation; 0: none. A broken communicator must be rebuilt."""
    finalized: bool = False
    ran: bool = False
    """True if its members have run steps together at this generation: no other device has newer state of their job."""


@dataclass(frozen=True)
class JobState:
    """One job. While it runs, the communicator with the same id holds its members and generation."""

    id: int
    settings: str
    devices: tuple[int, ...]
    """Ids of the members when this record was written. Their event logs hold the job's events."""
    ended: bool = False
    error: str = ""
    """Class of the error that ended the job; empty: the job did not fail."""
    text: str = ""
    run: str = ""
    """Unique name of this run. Arenas carry it, so that a restarted device knows which run its memory belongs to."""


MAX_ENDED = 16
"""Number of ended jobs that stay known, for clients that reconnect and ask for the outcome."""


def with_job(jobs: Mapping[int, JobState], job: JobState) -> dict[int, JobState]:
    """``jobs`` with ``job`` added or replaced, and without all but the last ``MAX_ENDED`` ended jobs."""
    found = {key: one for key, one in jobs.items() if key != job.id} | {job.id: job}
    ended = [key for key, one in found.items() if one.ended]
    return {key: one for key, one in found.items() if key not in ended[:-MAX_ENDED]}


@dataclass(frozen=True)
class State:
    """The whole membership state of a cluster."""

    config: DetectorConfig = field(default_factory=DetectorConfig)
    members: Mapping[int, Member] = field(default_factory=dict)
    communicators: Mapping[int, CommunicatorState] = field(default_factory=dict)
    jobs: Mapping[int, JobState] = field(default_factory=dict)
    next_communicator: int = 1
    last_tick: float = 0.0
    observer: ObserverHealth = PUNCTUAL
    """How late the coordinator's own ticks were lately."""
    deaf_s: float = 0.0
    """Seconds, of all that have passed, in which the coordinator did not run, or heard no device at all."""
    link_faults: Mapping[int, LinkFaults] = field(default_factory=dict)
    """Link faults of each communicator. The journal does not store them: a device that cannot reach a peer reports it
    again."""
    unreachable: Mapping[Connection, str] = field(default_factory=dict)
    """Reasons why connections failed when they were last tried (``reachability``). Not in the journal either: a
    restarted coordinator tries again."""

    def heard_time(self, now: float) -> float:
        """A clock that stands still while the coordinator could not hear a device that comes back."""
        return min(now, self.last_tick + 2 * self.config.heartbeat_s) - self.deaf_s

    def member(self, device_id: int) -> Member:
        if device_id not in self.members:
            raise NotFound(f"device {device_id} is unknown; known: {sorted(self.members) or 'none yet'}")
        return self.members[device_id]

    def communicator(self, communicator_id: int) -> CommunicatorState:
        if communicator_id not in self.communicators:
            raise NotFound(f"communicator {communicator_id} is unknown or destroyed; call CommInit for one")
        return self.communicators[communicator_id]

    def usable(self) -> list[int]:
        """Ids of devices that can get new work: healthy ones first, then by the number of their communicators."""
        load = dict.fromkeys(self.members, 0)
        for communicator in self.communicators.values():
            for device_id in communicator.members:
                load[device_id] = load.get(device_id, 0) + 1
        ready = [device_id for device_id, member in self.members.items() if member.available]
        return sorted(ready, key=lambda device_id: (self.members[device_id].health, load[device_id], device_id))

    def link_faults_of(self, communicator_id: int) -> LinkFaults:
        return self.link_faults.get(communicator_id, NO_LINK_FAULTS)

    def with_member(self, member: Member) -> State:
        return replace(self, members={**self.members, member.info.device_id: member})

    def with_communicator(self, one: CommunicatorState) -> State:
        return replace(self, communicators={**self.communicators, one.id: one})

    def with_link_faults(self, communicator_id: int, faults: LinkFaults) -> State:
        return replace(self, link_faults={**self.link_faults, communicator_id: faults})
