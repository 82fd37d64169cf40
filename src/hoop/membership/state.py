"""What is known of a communicator's failed links; the rules are in ``links``.

What a coordinator knows: the devices, the communicators, and nothing that can be derived.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from hoop.errors import NotFound
from hoop.membership.failure_detector import DetectorConfig, HeartbeatHistory
from hoop.topology import DeviceInfo

TRIES = 3
"""How often at most a pair gets new links within …"""
WINDOW_S = 60.0
"""… this time; and how long the first eviction lasts."""

Pair = tuple[int, int]
"""Two devices, the lower number first."""


@dataclass(frozen=True)
class LinkFaults:
    """What is known of a communicator's failed links."""

    generation: int = 0
    """Of the complaints."""
    complaints: frozenset[tuple[int, int]] = frozenset()
    """Who complains of whom."""
    since: float = 0.0
    """When the first of them came."""
    closed: int = 0
    """Up to this generation everything is decided."""
    worked: int = 0
    """The newest generation in which everybody reached everybody."""
    tried: tuple[tuple[Pair, int, float], ...] = ()
    """Which pairs got new links, after which generation, and when."""
    out: Mapping[int, float] = field(default_factory=dict)
    """Who was evicted, and until when."""
    evictions: Mapping[int, int] = field(default_factory=dict)
    """How often each was."""

    def failed_again(self, pair: Pair, now: float) -> bool:
        tries = [generation for one, generation, when in self.tried if one == pair and now - when < WINDOW_S]
        return bool(tries) and (tries[-1] >= self.worked or len(tries) >= TRIES)


class Health(StrEnum):
    """A device's state.

    alive ──▶ suspect ──▶ dead        suspect: a link or a call failed, it is being asked
      ▲──────────┘          │         dead: silent, refused, or failing
      ▲─────────────────────┘         it may join again, as a new incarnation or after a stall
    left: it said goodbye
    """

    ALIVE = "alive"
    SUSPECT = "suspect"
    DEAD = "dead"
    LEFT = "left"


class OperationOutcome(StrEnum):
    """How a communicator's latest work stands."""

    IN_PROGRESS = "in_progress"
    """Running, or nothing has run yet."""
    SUCCESS = "success"
    FAILED = "failed"


@dataclass(frozen=True)
class Member:
    """One device, as the coordinator sees it."""

    info: DeviceInfo
    pulse: HeartbeatHistory
    health: Health = Health.ALIVE
    reason: str = ""
    ended: bool = False
    """Its process is known to have ended, and its memory with it. A dead device may otherwise just be silent."""

    @property
    def usable(self) -> bool:
        return self.health in (Health.ALIVE, Health.SUSPECT)


@dataclass(frozen=True)
class CommunicatorState:
    """One communicator: its members in rank order, at one generation."""

    id: int
    members: tuple[int, ...]
    generation: int = 1
    outcome: OperationOutcome = OperationOutcome.IN_PROGRESS
    reason: str = ""
    broken_by: int = 0
    """The device whose death broke it; 0: none. Only a rebuild mends that."""
    finalized: bool = False


@dataclass(frozen=True)
class JobState:
    """One job. While it runs, the communicator with its id says who takes part, at which generation."""

    id: int
    settings: str
    devices: tuple[int, ...]
    """Who took part when this was written: they remember what it told."""
    ended: bool = False
    error: str = ""
    """How it failed: an error's class, and its words; empty: it did not."""
    text: str = ""
    run: str = ""
    """Its own name, unlike any other job's: by it a device knows what its memory holds of it."""


MAX_ENDED = 16
"""Jobs that have ended and are still known, for whoever comes back to ask."""


def with_job(jobs: Mapping[int, JobState], job: JobState) -> dict[int, JobState]:
    """These jobs and this one, without those that ended long ago."""
    found = {key: one for key, one in jobs.items() if key != job.id} | {job.id: job}
    ended = [key for key, one in found.items() if one.ended]
    return {key: one for key, one in found.items() if key not in ended[:-MAX_ENDED]}


@dataclass(frozen=True)
class State:
    """All of it; replaced as a whole by every step."""

    config: DetectorConfig = field(default_factory=DetectorConfig)
    members: Mapping[int, Member] = field(default_factory=dict)
    communicators: Mapping[int, CommunicatorState] = field(default_factory=dict)
    jobs: Mapping[int, JobState] = field(default_factory=dict)
    next_communicator: int = 1
    last_tick: float = 0.0
    troubles: Mapping[int, LinkFaults] = field(default_factory=dict)
    """By communicator. Not in the journal: whoever cannot reach a peer says so again."""

    def member(self, device_id: int) -> Member:
        if device_id not in self.members:
            raise NotFound(f"device {device_id} is unknown; known: {sorted(self.members) or 'none yet'}")
        return self.members[device_id]

    def communicator(self, communicator_id: int) -> CommunicatorState:
        if communicator_id not in self.communicators:
            raise NotFound(f"communicator {communicator_id} is unknown or destroyed; call CommInit for one")
        return self.communicators[communicator_id]

    def usable(self) -> list[int]:
        """The devices that can be used: those in good health first, then those in the fewest communicators."""
        load = dict.fromkeys(self.members, 0)
        for communicator in self.communicators.values():
            for device_id in communicator.members:
                load[device_id] = load.get(device_id, 0) + 1
        ready = [device_id for device_id, member in self.members.items() if member.usable]
        return sorted(
            ready, key=lambda device_id: (self.members[device_id].health, load[device_id], device_id)
        )

    def trouble(self, communicator_id: int) -> LinkFaults:
        return self.troubles.get(communicator_id, LinkFaults())

    def with_member(self, member: Member) -> State:
        return replace(self, members={**self.members, member.info.device_id: member})

    def with_communicator(self, one: CommunicatorState) -> State:
        return replace(self, communicators={**self.communicators, one.id: one})

    def with_trouble(self, communicator_id: int, trouble: LinkFaults) -> State:
        return replace(self, troubles={**self.troubles, communicator_id: trouble})
