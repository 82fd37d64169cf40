"""What a device does in a job: where its time goes and what its links carry, from sums in its heartbeats.

A heartbeat has sums since the task began (``pb.TaskActivity``). The view keeps a few of them, each the first after a
step has ended, and shows differences over about ``WINDOW_S`` seconds, or over the last step if that is longer. Another
process made the numbers: they may be anything.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

from hoop.wire.generated import hoop_pb2 as pb

WINDOW_S = 4.0
SPACING_S = 0.3
"""A sample that is closer to the one before it is replaced by the next."""
MAX_SAMPLES = 24
"""More than ``WINDOW_S`` has, at ``SPACING_S``."""
STALLED_S = 5.0
"""Without a step for this long, and for three times a step, there is nothing to show."""
MAX_LINKS = 64
MAX_SHARDS = 256
PARTS = ("load", "forward", "backward", "communicate", "update", "idle", "other")
"""Parts of a step's time. ``idle``: waiting for other ranks. ``other``: between instructions, and evaluation,
checkpoints and recoveries between steps."""


class LinkBytes(NamedTuple):
    """Bytes that a link over TCP has carried since it was opened."""

    peer: int
    """Device id."""
    sent: int
    received: int


class LinkRate(NamedTuple):
    """Bytes a second of a link over TCP."""

    peer: int
    sent: float
    received: float


class Shares(NamedTuple):
    """Shares of a device's time. They do not sum up to 1: there is other work."""

    compute: float
    communicate: float
    idle: float


class Sample(NamedTuple):
    """The sums of one heartbeat."""

    at_s: float
    steps: int
    seconds: tuple[float, ...]
    """By part, without ``other``."""
    bytes_sent: int
    links: tuple[LinkBytes, ...]


@dataclass(frozen=True)
class ActivityView:
    """One device in one job."""

    job: int
    rank: int
    generation: int
    samples: tuple[Sample, ...]
    """Oldest first, at least one."""
    at_s: float = 0.0
    """Of the newest heartbeat, by the device's clock."""
    shards: tuple[int, ...] = ()
    """That it computes in a step."""
    stages: tuple[int, ...] = ()

    @property
    def window_s(self) -> float:
        return self.samples[-1].at_s - self.samples[0].at_s

    @property
    def steps(self) -> int:
        """Done in the window."""
        return self.samples[-1].steps - self.samples[0].steps

    @property
    def moves(self) -> bool:
        """Whether steps end."""
        if self.steps < 1:
            return False
        return self.at_s - self.samples[-1].at_s < max(STALLED_S, 3 * self.window_s / self.steps)

    @property
    def split(self) -> dict[str, float]:
        """Seconds of a step by part, over the window; empty before the second step, and if none has ended lately."""
        if not self.moves:
            return {}
        first, last = self.samples[0], self.samples[-1]
        parts = [max(0.0, now - then) / self.steps for then, now in zip(first.seconds, last.seconds, strict=True)]
        other = max(0.0, self.window_s / self.steps - sum(parts))
        return dict(zip(PARTS, (*parts, other), strict=True))

    @property
    def step_seconds(self) -> float | None:
        return self.window_s / self.steps if self.moves else None

    @property
    def bytes_a_second(self) -> float | None:
        """Sent to other ranks, over links and through shared memory; None before the second step."""
        if self.window_s <= 0:
            return None
        if not self.moves:
            return 0.0
        return max(0, self.samples[-1].bytes_sent - self.samples[0].bytes_sent) / self.window_s

    @property
    def links(self) -> tuple[LinkRate, ...]:
        """Of the links over TCP, by peer."""
        if not self.moves:
            return ()
        before = {one.peer: one for one in self.samples[0].links}
        rates = []
        for one in self.samples[-1].links:
            then = before.get(one.peer, LinkBytes(one.peer, 0, 0))
            sent, received = max(0, one.sent - then.sent), max(0, one.received - then.received)
            rates.append(LinkRate(one.peer, sent / self.window_s, received / self.window_s))
        return tuple(sorted(rates))

    @property
    def shares(self) -> Shares | None:
        """Of the time in the window; None if no step has ended lately."""
        split = self.split
        total = sum(split.values())
        if not total:
            return None
        compute = sum(split[one] for one in ("load", "forward", "backward", "update"))
        return Shares(compute / total, split["communicate"] / total, split["idle"] / total)

    @property
    def summary(self) -> str:
        """Like ``computes 70%, communicates 10%, waits 20%``; empty if no step has ended lately."""
        found = self.shares
        if found is None:
            return ""
        return f"computes {found.compute:.0%}, communicates {found.communicate:.0%}, waits {found.idle:.0%}"


def after_heartbeat(before: ActivityView | None, message: pb.TaskActivity) -> ActivityView:
    """With the sums of a heartbeat."""
    sample = _sample(message)
    fresh = ActivityView(
        message.job_id,
        message.rank,
        message.generation,
        (sample,),
        sample.at_s,
        tuple(message.shards[:MAX_SHARDS]),
        tuple(message.stages[:MAX_SHARDS]),
    )
    if before is None or (before.job, before.rank, before.generation) != (fresh.job, fresh.rank, fresh.generation):
        return fresh
    last = before.samples[-1]
    if sample.at_s < before.at_s or sample.steps < last.steps:  # a task that was started again
        return fresh
    samples = before.samples if sample.steps == last.steps else _extended(before.samples, sample)
    return replace(fresh, samples=samples)


def _extended(samples: tuple[Sample, ...], sample: Sample) -> tuple[Sample, ...]:
    """With one more sample, and without those that the window does not need any more."""
    close = len(samples) > 1 and samples[-1].at_s - samples[-2].at_s < SPACING_S
    kept = [*(samples[:-1] if close else samples), sample]
    while len(kept) > 2 and (sample.at_s - kept[1].at_s >= WINDOW_S or len(kept) > MAX_SAMPLES):
        del kept[0]
    return tuple(kept)


def _sample(message: pb.TaskActivity) -> Sample:
    sums = (
        message.load_s,
        message.forward_s,
        message.backward_s,
        message.communicate_s,
        message.update_s,
        message.idle_s,
    )
    by_peer: dict[int, LinkBytes] = {}
    for one in message.links[:MAX_LINKS]:  # a pair of ranks may have a link in several communicators
        known = by_peer.get(one.device_id, LinkBytes(one.device_id, 0, 0))
        by_peer[one.device_id] = LinkBytes(one.device_id, known.sent + one.sent, known.received + one.received)
    return Sample(
        _finite(message.at_s),
        message.steps,
        tuple(map(_finite, sums)),
        message.bytes_sent,
        tuple(by_peer.values()),
    )


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 0.0
