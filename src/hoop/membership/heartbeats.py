"""A device's heartbeats and calls, their time limits, and two verdicts: dead by silence, dead by failed calls.

The two cover each other's blind spot. A stopped process keeps its sockets open, and only its heartbeats cease. A
process whose server is broken may go on sending heartbeats. All times are seconds of a monotonic clock: a wall clock
that jumps changes nothing. ``failure_detector`` asks for the verdicts and acts on them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hoop.errors import InvalidArgument
from hoop.membership.fast_replace import replace


@dataclass(frozen=True)
class DetectorConfig:
    """Time limits of the failure detector."""

    heartbeat_s: float = 0.1
    lease_s: float = 1.5
    """Seconds without a heartbeat after which a device is dead. The worst gap seen under heavy load was 0.19 s."""
    first_heartbeat_s: float = 5.0
    """Time from joining to the first heartbeat, at which the lease begins.

    The lease is measured for an open heartbeat stream. Before that the answer to the join has to arrive and a stream
    has to be opened, on a machine on which hundreds of devices may start at once."""
    failures: int = 3
    """Number of failed calls, of the last ``window`` calls, that make a device dead."""
    window: int = 5
    """Number of a device's last calls that are counted."""
    isolation_s: float = 60.0
    """Seconds for which a coordinator that hears no device at all blames itself, before it declares all of them
    dead."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < self.lease_s:
            raise InvalidArgument(
                f"heartbeat {self.heartbeat_s:g} s must be above 0 and below the lease, {self.lease_s:g} s"
            )
        if not 1 <= self.failures <= self.window:
            raise InvalidArgument(f"failures: {self.failures} is not in 1..{self.window} (the window)")


@dataclass(frozen=True)
class HeartbeatHistory:
    """Heartbeats of one device, and the outcomes of the coordinator's calls to it. Immutable."""

    last_heartbeat: float
    calls: tuple[bool, ...] = field(default=())
    """Outcomes of the last ``window`` calls, oldest first; True: the device answered."""
    suspended_until: float = 0.0
    """Time before which silence does not count: the device loads a job, which may delay its heartbeats."""
    first_heartbeat_until: float = 0.0
    """Deadline of the first heartbeat; 0 once it was received."""

    @classmethod
    def joined(cls, now: float, config: DetectorConfig) -> HeartbeatHistory:
        """The history of a device that has just joined and has sent no heartbeat yet."""
        return cls(now, first_heartbeat_until=now + max(config.first_heartbeat_s, config.lease_s))

    def with_heartbeat(self, now: float) -> HeartbeatHistory:
        return replace(self, last_heartbeat=max(now, self.last_heartbeat), first_heartbeat_until=0.0)

    def with_call(self, ok: bool, config: DetectorConfig) -> HeartbeatHistory:
        return replace(self, calls=(*self.calls, ok)[-config.window :])

    def discount_pause(self, seconds: float, now: float) -> HeartbeatHistory:
        """Ignores the last ``seconds``, during which the coordinator itself was paused or cut off."""
        first_heartbeat_until = self.first_heartbeat_until and self.first_heartbeat_until + seconds
        return replace(
            self, last_heartbeat=min(now, self.last_heartbeat + seconds), first_heartbeat_until=first_heartbeat_until
        )

    def silence_verdict(self, now: float, config: DetectorConfig) -> str:
        """Why the device is dead by its silence; empty if it is not."""
        silent = now - max(self.last_heartbeat, self.suspended_until)
        if silent <= config.lease_s or now <= self.first_heartbeat_until:
            return ""
        if self.first_heartbeat_until:
            return f"no heartbeat within {silent:.1f} s after it joined"
        return f"no heartbeat for {silent:.1f} s (lease {config.lease_s:g} s)"

    def call_verdict(self, config: DetectorConfig) -> str:
        """Why the device is dead by its failed calls; empty if it is not."""
        failed = self.calls.count(False)
        if failed >= config.failures:
            return f"{failed} of the last {len(self.calls)} calls failed"
        return ""
