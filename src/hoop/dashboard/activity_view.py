"""What a device does in a job: where its time goes and what its links carry, from sums in its heartbeats.

A heartbeat has sums since the task began (``pb.TaskActivity``). The view keeps a few of them, each the first after a
step has ended, and computes ``Figures`` from differences over about ``WINDOW_S`` seconds, or over the last step if that
is longer. Another process made the numbers: they may be anything.

Measured figures vary a little all the time. Pages show the same ones as long as they are about right (``about_equal``):
a digit that flickers tells nobody anything, and a browser on a machine that trains takes time from the devices for
every change that it draws. The figures of all devices change together (``refreshed_together``), so that it draws once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from hoop.wire.generated import hoop_pb2 as pb

WINDOW_S = 4.0
SPACING_S = 0.3
"""Minimum seconds between two kept samples; a sample closer to the one before it is replaced by the next."""
MAX_SAMPLES = 24
"""Maximum number of samples kept. A window of ``WINDOW_S`` with samples every ``SPACING_S`` has fewer."""
STALLED_S = 5.0
"""Without a step for this long, and for three times a step, there is nothing to show."""
MAX_LINKS = 64
MAX_SHARDS = 256
MAX_SHARE_CHANGE = 0.05
"""Largest absolute difference of a share of a device's time that counts as unchanged."""
MAX_RATE_CHANGE = 0.05
"""Largest relative difference of a rate or duration that counts as unchanged."""
HELD_S = WINDOW_S
"""Minimum seconds before shown figures are replaced. Until then the current figures share samples with them."""
SHOWN_S = 30.0
"""Maximum seconds for which figures are shown, however little the current ones differ."""
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
    """Seconds by part, in the order of ``PARTS``, without ``other``."""
    bytes_sent: int
    links: tuple[LinkBytes, ...]


@dataclass(frozen=True)
class Figures:
    """Where a device's time went and what its links carried, over a window of some seconds."""

    step_seconds: float | None
    """None before the second step, and if none has ended lately."""
    split: dict[str, float]
    """Seconds of a step by part; empty if ``step_seconds`` is None."""
    bytes_a_second: float | None
    """Bytes a second sent to other ranks, over links and through shared memory; None before the second step."""
    links: tuple[LinkRate, ...]
    """Rates of the links over TCP, by peer."""

    @property
    def shares(self) -> Shares | None:
        """Shares of the time in the window; None if no step has ended lately."""
        total = sum(self.split.values())
        if not total:
            return None
        compute = sum(self.split[one] for one in ("load", "forward", "backward", "update"))
        return Shares(compute / total, self.split["communicate"] / total, self.split["idle"] / total)

    @property
    def summary(self) -> str:
        """Like ``computes 70%, communicates 10%, waits 20%``; empty if no step has ended lately."""
        found = self.shares
        if found is None:
            return ""
        return f"computes {found.compute:.0%}, communicates {found.communicate:.0%}, waits {found.idle:.0%}"


def comparable(one: Figures, other: Figures) -> bool:
    """Whether both have the same parts and links: a device that has just begun, or stopped, to do steps has others."""
    peers, other_peers = ([link.peer for link in figures.links] for figures in (one, other))
    known = (one.bytes_a_second is None) == (other.bytes_a_second is None)
    return known and one.split.keys() == other.split.keys() and peers == other_peers


def about_equal(one: Figures, other: Figures) -> bool:
    """Whether a page may go on to show the one, although the other is measured now."""
    if not comparable(one, other):
        return False
    rates = [(one.step_seconds, other.step_seconds), (one.bytes_a_second, other.bytes_a_second)]
    for link, same in zip(one.links, other.links, strict=True):
        rates += [(link.sent, same.sent), (link.received, same.received)]
    if not all(_close(rate, same) for rate, same in rates):
        return False
    if not one.split or one.step_seconds is None or other.step_seconds is None:
        return True
    return all(
        abs(seconds / one.step_seconds - other.split[part] / other.step_seconds) <= MAX_SHARE_CHANGE
        for part, seconds in one.split.items()
    )


def _close(rate: float | None, other: float | None) -> bool:
    if rate is None or other is None:
        return rate is other
    return abs(rate - other) <= MAX_RATE_CHANGE * max(rate, other)


@dataclass(frozen=True)
class ActivityView:
    """One device in one job."""

    job: int
    rank: int
    generation: int
    samples: tuple[Sample, ...]
    """Oldest first, at least one."""
    at_s: float = 0.0
    """Time of the newest heartbeat, by the device's clock."""
    shards: tuple[int, ...] = ()
    """Shards that the device computes in a step."""
    stages: tuple[int, ...] = ()
    """Stages of the model that the device holds."""
    shown: Figures | None = None
    """Figures that pages show; None: the current ones."""
    shown_since_s: float = 0.0
    """Time at which ``shown`` was measured, by the device's clock."""

    @property
    def figures(self) -> Figures:
        """For pages: the current figures, or earlier ones that are about equal."""
        return self.shown if self.shown is not None else self.current

    @property
    def current(self) -> Figures:
        """The figures of the window that ends with the newest sample."""
        first, last = self.samples[0], self.samples[-1]
        window_s, steps = last.at_s - first.at_s, last.steps - first.steps
        moves = steps >= 1 and self.at_s - last.at_s < max(STALLED_S, 3 * window_s / steps)
        if not moves:
            return Figures(None, {}, None if window_s <= 0 else 0.0, ())
        parts = [max(0.0, now - then) / steps for then, now in zip(first.seconds, last.seconds, strict=True)]
        other = max(0.0, window_s / steps - sum(parts))
        split = dict(zip(PARTS, (*parts, other), strict=True))
        if window_s <= 0:
            return Figures(window_s / steps, split, None, ())
        sent = max(0, last.bytes_sent - first.bytes_sent) / window_s
        before = {one.peer: one for one in first.links}
        rates = []
        for one in last.links:
            then_bytes = before.get(one.peer, LinkBytes(one.peer, 0, 0))
            rates.append(
                LinkRate(
                    one.peer,
                    max(0, one.sent - then_bytes.sent) / window_s,
                    max(0, one.received - then_bytes.received) / window_s,
                )
            )
        return Figures(window_s / steps, split, sent, tuple(sorted(rates)))

    def steadied(self, before: ActivityView) -> ActivityView:
        """With what pages show: that of ``before``, if it is about right and not old; else the current figures."""
        current = self.current
        if before.shown is not None:
            shown_s = self.at_s - before.shown_since_s
            held = shown_s < HELD_S and comparable(before.shown, current)
            if held or (shown_s < SHOWN_S and about_equal(before.shown, current)):
                return replace(self, shown=before.shown, shown_since_s=before.shown_since_s)
        return self.with_current_figures()

    def with_current_figures(self) -> ActivityView:
        return replace(self, shown=self.current, shown_since_s=self.at_s)


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
    return replace(fresh, samples=samples).steadied(before)


def refreshed_together(activities: Sequence[ActivityView]) -> list[ActivityView]:
    """If the figures of one are current, those of all are, so that a page draws once for all of them."""
    if not any(one.shown is not None and one.shown_since_s == one.at_s for one in activities):
        return list(activities)
    return [one if one.shown is None else one.with_current_figures() for one in activities]


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
