"""What failures cost: how much of its time a job spends on steps that last.

    elastic (data parallel)   a device is lost: a pause, its part of the step is computed again, the others go on;
                              it comes back: a pause, and it is one more
    mirrored (all others)     a pause, the state is put together from copies and the model cut for those who are left;
                              what was done since the last copy is done again, likewise when a device comes back
    without mirrors           everybody goes back to the last checkpoint and starts again, when the device is back,
                              or without it

Between failures steps are not simulated one by one: they take what ``step_seconds`` says for so many devices.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument

HOUR = 3600.0


@dataclass(frozen=True)
class Failures:
    """How often devices are lost, and what each loss costs."""

    an_hour: float = 0.0
    """Losses an hour and device, by chance."""
    at: Sequence[float] = ()
    """Losses at these seconds, besides."""
    back_after: float | None = 300.0
    """Seconds until a lost device is back; None: never."""
    pause: float = 2.0
    """Until a loss is noticed and the others are seated again."""
    recut: float = 1.0
    """To put the state together from copies and cut the model anew, where ranks hold parts of it."""
    restart: float = 20.0
    """To start again from a checkpoint, where the others cannot go on."""
    checkpoint_every: int = 500
    """Steps."""
    seed: int = 0

    def __post_init__(self) -> None:
        times = (self.an_hour, self.pause, self.recut, self.restart)
        if not all(one >= 0 for one in times) or self.checkpoint_every < 1:
            raise InvalidArgument(f"failures: {self} has a rate, a time or a number of steps below its least")


@dataclass(frozen=True)
class Goodput:
    """A job among failures."""

    seconds: float
    steps: int
    losses: int
    repeated: int
    """Steps that were done again."""
    useful: float
    """The share of the time that its steps would have taken without failures."""


def goodput(
    step_seconds: Callable[[int], float | None],
    devices: int,
    elastic: bool,
    failures: Failures,
    steps: int,
    copied_every: int = 0,
) -> Goodput:
    """``step_seconds(n)``: a step on n devices, or None where it cannot run on so few.

    ``elastic``: those who are left go on. ``copied_every``: from copies made every so many steps; 0: they have it all.
    """
    usual = step_seconds(devices)
    if usual is None or not usual > 0:
        raise InvalidArgument(f"step_seconds: {usual} on all {devices} devices")
    chance = random.Random(failures.seed)
    given = sorted(failures.at)
    now, done, alive, losses, repeated = 0.0, 0, devices, 0, 0
    returns: list[float] = []
    recut = failures.recut if copied_every else 0.0
    most = 100.0 * steps * usual + 100 * (failures.restart + (failures.back_after or 0.0))

    def next_loss() -> float:
        rate = alive * failures.an_hour / HOUR
        by_chance = now + chance.expovariate(rate) if rate > 0 else math.inf
        return min(by_chance, given[0] if given else math.inf)

    loss = next_loss()
    while done < steps and now < most:
        one = step_seconds(alive)
        if one is None:  # too few: nothing happens until somebody is back
            if not returns:
                break
            now, alive = heapq.heappop(returns) + failures.restart, alive + 1
            loss = next_loss()
            continue
        until = min(loss, returns[0] if returns else math.inf)
        whole = (
            steps - done if until == math.inf else max(0, min(steps - done, math.floor((until - now) / one)))
        )
        now, done = now + whole * one, done + whole
        if done == steps:
            break
        if returns and until == returns[0]:
            heapq.heappop(returns)
            now, alive = max(now, until) + failures.pause + recut, alive + 1
        else:
            losses += 1
            if given and until == given[0]:
                given.pop(0)
            now, alive = max(now, until) + failures.pause, alive - 1
            if failures.back_after is not None:
                heapq.heappush(returns, now + failures.back_after)
            if elastic and copied_every:
                back = done - done % copied_every
                repeated, done = repeated + done - back, back
                now += recut
            elif elastic:
                now += one / (alive + 1)  # its part of the step, once more
            else:
                back = done - done % failures.checkpoint_every
                repeated, done = repeated + done - back, back
                now += failures.restart
                if returns:  # a seat is kept for it
                    now, alive = max(now, heapq.heappop(returns)), alive + 1
        loss = next_loss()
    return Goodput(now, done, losses, repeated, done * usual / now if now else 1.0)
