"""A device's signs of life and failed calls, the observer's own health, and the verdicts that follow from them.

    sign of life    a heartbeat; a connection that the device's server answers; the word of its host's kernel: it runs
    witness         another device, whose connection the silent one's server answers: a sign that counts for four leases
    silence         time without any sign, in which the coordinator itself was running
    lease           silence that makes a device dead: as configured, and longer where the coordinator itself is late
                    (``ObserverHealth``) or where this device's heartbeats have come unevenly (``spread_s``)

A stopped process keeps its sockets open and gives no sign. A process whose server is broken may go on sending
heartbeats: then failed calls decide. All times are seconds of a monotonic clock: a wall clock that jumps changes
nothing. ``failure_detector`` asks for the verdicts and acts on them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from hoop.errors import InvalidArgument
from hoop.membership.fast_replace import replace
from hoop.wire.channels import LEASE_S

LONGEST_LEASE_S = 20.0
"""Seconds up to which a lease is extended for slow processes."""
PROBE_AFTER = 1 / 4
"""Silence after which a device is probed, as a fraction of a lease."""
MAX_LATE_SECONDS = 7
WITNESSED_LEASES = 4.0
"""A device that other devices reach, and the coordinator does not, is dead after this many leases."""
_SPREAD = 8.0
"""A gap between heartbeats is usual up to this many standard deviations above the mean gap."""
_WEIGHT = 1 / 32
"""Weight of the newest gap in the mean and the variance of the gaps."""


@dataclass(frozen=True)
class DetectorConfig:
    """Time limits of the failure detector."""

    heartbeat_s: float = 0.1
    lease_s: float = LEASE_S
    """Seconds without a sign of life after which a device is dead."""
    first_heartbeat_s: float = 5.0
    """Time from joining to the first heartbeat, at which the lease begins.

    The lease is measured for an open heartbeat stream. Before that the answer to the join has to arrive and a stream
    has to be opened, on a machine on which hundreds of devices may start at once."""
    failures: int = 3
    """Number of failed calls in succession, over at least a lease, that make a device dead that sends heartbeats."""
    isolation_s: float = 60.0
    """Seconds for which a coordinator that hears no device at all blames itself, before it declares all of them
    dead."""
    hung_s: float = 600.0
    """Seconds without a heartbeat after which a device is dead although its process runs."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < self.lease_s:
            raise InvalidArgument(
                f"heartbeat {self.heartbeat_s:g} s must be above 0 and below the lease, {self.lease_s:g} s"
            )
        if self.failures < 1:
            raise InvalidArgument(f"failures: {self.failures} is below 1")


@dataclass(frozen=True)
class ObserverHealth:
    """How punctual the coordinator itself is. Its ticks are its measure: they come every heartbeat interval.

    A coordinator that waits for a core sees heartbeats late, and sees them together. Each second with a late tick
    extends every lease by one more lease, each punctual second takes one back.
    """

    late_seconds: int = 0
    """Recent seconds with a late tick less punctual ones, 0 to ``MAX_LATE_SECONDS``."""
    since: float = 0.0
    """Beginning of the second that is being judged."""
    late: bool = False
    """Whether a tick of this second was late."""

    def after_tick(self, gap: float, now: float, config: DetectorConfig) -> ObserverHealth:
        late = self.late or gap - config.heartbeat_s > max(config.heartbeat_s, config.lease_s / 8)
        if now - self.since < 1:
            return self if late == self.late else replace(self, late=late)
        return ObserverHealth(max(0, min(MAX_LATE_SECONDS, self.late_seconds + (1 if late else -1))), now)


PUNCTUAL = ObserverHealth()


@dataclass(frozen=True)
class HeartbeatHistory:
    """Signs of life of one device, and the failures of the coordinator's calls to it. Immutable."""

    last_heartbeat: float
    last_seen: float = 0.0
    """Last time at which the device's process was seen to run, other than by a heartbeat; 0: never."""
    last_witnessed: float = 0.0
    """Last time at which another device reached its server; 0: never."""
    mean_s: float = 0.0
    """Mean of the gaps between heartbeats, the newest ones first in weight; 0: no gap was measured."""
    variance: float = 0.0
    """Variance of these gaps."""
    failed_calls: int = 0
    """Number of calls that have failed since one was answered, while heartbeats came."""
    failing_since: float = 0.0
    """Time of the first of them."""
    suspended_until: float = 0.0
    """Time before which silence does not count: the device loads a job, which may delay its heartbeats."""
    first_heartbeat_until: float = 0.0
    """Deadline of the first heartbeat; 0 once it was received."""

    @classmethod
    def joined(cls, now: float, config: DetectorConfig) -> HeartbeatHistory:
        """The history of a device that has just joined and has sent no heartbeat yet."""
        return cls(now, first_heartbeat_until=now + max(config.first_heartbeat_s, config.lease_s))

    def with_heartbeat(self, now: float) -> HeartbeatHistory:
        if now <= self.last_heartbeat:
            return self if not self.first_heartbeat_until else replace(self, first_heartbeat_until=0.0)
        gap, mean, variance = now - self.last_heartbeat, self.mean_s, self.variance
        if self.first_heartbeat_until or self.last_heartbeat < self.suspended_until:
            pass  # the gap has another cause
        elif not mean:
            mean = gap
        else:
            away = gap - mean
            mean += _WEIGHT * away
            variance = (1 - _WEIGHT) * (variance + _WEIGHT * away * away)
        return replace(self, last_heartbeat=now, mean_s=mean, variance=variance, first_heartbeat_until=0.0)

    def with_sighting(self, now: float) -> HeartbeatHistory:
        """The history after the process was seen to run."""
        return replace(self, last_seen=max(now, self.last_seen))

    def with_witness(self, now: float) -> HeartbeatHistory:
        """The history after another device has reached its server."""
        return replace(self, last_witnessed=max(now, self.last_witnessed))

    def with_call(self, ok: bool, now: float) -> HeartbeatHistory:
        if ok:
            return replace(self, failed_calls=0, failing_since=0.0) if self.failed_calls else self
        return replace(self, failed_calls=self.failed_calls + 1, failing_since=self.failing_since or now)

    def discount_pause(self, seconds: float, now: float) -> HeartbeatHistory:
        """Ignores the last ``seconds``, during which the coordinator itself was paused or cut off."""
        return replace(
            self,
            last_heartbeat=min(now, self.last_heartbeat + seconds),
            last_seen=self.last_seen and min(now, self.last_seen + seconds),
            last_witnessed=self.last_witnessed and min(now, self.last_witnessed + seconds),
            failing_since=self.failing_since and min(now, self.failing_since + seconds),
            first_heartbeat_until=self.first_heartbeat_until and self.first_heartbeat_until + seconds,
        )

    @property
    def spread_s(self) -> float:
        """The longest gap between heartbeats that its recent ones make likely."""
        return self.mean_s + _SPREAD * math.sqrt(self.variance)

    def silent_s(self, now: float) -> float:
        """Seconds without a heartbeat that was due."""
        return now - max(self.last_heartbeat, self.suspended_until)

    def needs_probe(self, now: float, config: DetectorConfig) -> bool:
        """Whether it is silent for so long that the coordinator looks after it."""
        return self.silent_s(now) > PROBE_AFTER * config.lease_s

    def lease_s(self, config: DetectorConfig, observer: ObserverHealth) -> float:
        """The lease of this device, by this observer."""
        extended = max(config.lease_s * (1 + observer.late_seconds), self.spread_s)
        return max(config.lease_s, min(extended, LONGEST_LEASE_S))

    def silence_verdict(self, now: float, config: DetectorConfig, observer: ObserverHealth = PUNCTUAL) -> str:
        """Why the device is dead by its silence; empty if it is not."""
        if now <= self.first_heartbeat_until:
            return ""
        silent, lease = self.silent_s(now), self.lease_s(config, observer)
        if silent > max(config.hung_s, lease):
            return f"its process runs, but has sent no heartbeat for {silent:.1f} s (limit {config.hung_s:g} s)"
        if silent <= lease or now - self.last_seen <= lease:
            return ""
        unseen = min(silent, now - self.last_seen)
        if now - self.last_witnessed <= lease:
            if unseen <= WITNESSED_LEASES * lease:
                return ""
            return f"other devices reach it, and the coordinator has not for {unseen:.1f} s (lease {lease:g} s)"
        if self.first_heartbeat_until:
            return f"no heartbeat within {silent:.1f} s after it joined"
        return f"no heartbeat for {silent:.1f} s (lease {lease:g} s)"

    def other_sign(self, now: float, config: DetectorConfig, observer: ObserverHealth = PUNCTUAL) -> str:
        """By which sign a device lives that has sent no heartbeat for its lease; empty if heartbeats come."""
        silent, lease = self.silent_s(now), self.lease_s(config, observer)
        if now <= self.first_heartbeat_until or silent <= lease:
            return ""
        sign = "its process runs" if now - self.last_seen <= lease else "other devices reach it"
        return f"no heartbeat for {silent:.1f} s (lease {lease:g} s), and {sign}"

    def call_verdict(self, now: float, config: DetectorConfig) -> str:
        """Why the device is dead by its failed calls; empty if it is not."""
        if self.failed_calls >= config.failures and (failing := now - self.failing_since) >= config.lease_s:
            return f"it sends heartbeats, but its last {self.failed_calls} calls failed, over {failing:.1f} s"
        return ""
