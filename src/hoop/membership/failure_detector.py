"""When is a device dead? A lease that heartbeats renew, and X failed calls out of the last Y.

Two witnesses, because each is blind where the other sees: a stopped process keeps its sockets open
and only its heartbeats cease; a process whose server is broken may go on sending heartbeats.
All times are values of a monotonic clock: a wall clock that jumps changes nothing.

A coordinator that hears no device at all is the one in trouble (its network is cut, the machine was suspended): then
neither witness counts, until a device is heard again or ``isolation_s`` has passed.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hoop.errors import InvalidArgument


@dataclass(frozen=True)
class DetectorConfig:
    """How patient the detector is."""

    heartbeat_s: float = 0.1
    lease_s: float = 1.5
    """Silence after which a device is dead. The worst gap seen under heavy load was 0.19 s."""
    first_beat_s: float = 5.0
    """How long after it has joined a device may take to send its first heartbeat; its lease begins then.

    The lease is measured for a heartbeat stream that is open. Before that the answer to the join has to arrive and a
    stream has to be opened, on a machine on which hundreds may start at once."""
    failures: int = 3
    """X: this many failed calls …"""
    window: int = 5
    """… out of the last Y make a device dead."""
    isolation_s: float = 60.0
    """How long a coordinator that hears no device at all blames itself, before it believes that all are dead."""

    def __post_init__(self) -> None:
        if not 0 < self.heartbeat_s < self.lease_s:
            raise InvalidArgument(
                f"heartbeat {self.heartbeat_s:g} s must be above 0 and below the lease, {self.lease_s:g} s"
            )
        if not 1 <= self.failures <= self.window:
            raise InvalidArgument(f"failures: {self.failures} is not in 1..{self.window} (the window)")


@dataclass(frozen=True)
class HeartbeatHistory:
    """What is known of one device's life."""

    last_beat: float
    calls: tuple[bool, ...] = field(default=())
    """The outcomes of the last calls, oldest first."""
    excused_until: float = 0.0
    """Until then silence is no evidence: it loads what a job needs, and may not get round to heartbeats."""
    first_beat_until: float = 0.0
    """Until then the first heartbeat may come; 0 once it has."""

    @classmethod
    def joined(cls, now: float, config: DetectorConfig) -> HeartbeatHistory:
        """Of a device that has just joined, and has not sent a heartbeat yet."""
        return cls(now, first_beat_until=now + max(config.first_beat_s, config.lease_s))

    def beat(self, now: float) -> HeartbeatHistory:
        return replace(self, last_beat=max(now, self.last_beat), first_beat_until=0.0)

    def called(self, ok: bool, config: DetectorConfig) -> HeartbeatHistory:
        return replace(self, calls=(*self.calls, ok)[-config.window :])

    def excused(self, seconds: float, now: float) -> HeartbeatHistory:
        """The watcher itself was away for so long: silence meanwhile is nobody's fault."""
        first_beat_until = self.first_beat_until and self.first_beat_until + seconds
        return replace(self, last_beat=min(now, self.last_beat + seconds), first_beat_until=first_beat_until)

    def silence(self, now: float, config: DetectorConfig) -> str:
        """Why this device is dead by its silence, or an empty string."""
        silent = now - max(self.last_beat, self.excused_until)
        if silent <= config.lease_s or now <= self.first_beat_until:
            return ""
        if self.first_beat_until:
            return f"no heartbeat within {silent:.1f} s after it joined"
        return f"no heartbeat for {silent:.1f} s (lease {config.lease_s:g} s)"

    def failures(self, config: DetectorConfig) -> str:
        """Why this device is dead by its failed calls, or an empty string."""
        failed = self.calls.count(False)
        if failed >= config.failures:
            return f"{failed} of the last {len(self.calls)} calls failed"
        return ""
