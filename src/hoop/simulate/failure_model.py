"""Goodput under failures: the fraction of its time that a job spends on steps that are not lost.

    elastic (data parallel)   loss: a pause, the lost part of the step is computed again, the other devices go on;
                              return: a pause, then one device more
    replicated (all others)   loss: a pause, the state is restored from replicas and resharded for the other devices,
                              and the steps since the last replication run again; return: a pause and a reshard
    without replicas          loss: all devices roll back to the last checkpoint and restart, with the lost device once
                              it is back, or without it if it never returns

Steps between failures are not simulated one by one: ``step_seconds`` gives the time of a step for a number of devices.
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
    """How often devices are lost, and the costs of each loss; times in seconds."""

    per_hour: float = 0.0
    """Rate of random losses, per device and hour."""
    at: Sequence[float] = ()
    """Additional losses at these times."""
    return_after: float | None = 300.0
    """Time until a lost device is back; None: never."""
    pause: float = 2.0
    """Time to detect a loss and assign new ranks."""
    reshard: float = 1.0
    """Time to restore the state from replicas and reshard the model, where ranks hold parts of it."""
    restart: float = 20.0
    """Time to restart from a checkpoint."""
    checkpoint_every: int = 500
    """Steps between checkpoints."""
    seed: int = 0

    def __post_init__(self) -> None:
        times = (self.per_hour, self.pause, self.reshard, self.restart)
        if not all(one >= 0 for one in times) or self.checkpoint_every < 1:
            raise InvalidArgument(f"failures: {self} has a rate, a time or a number of steps below its least")


@dataclass(frozen=True)
class Goodput:
    """Progress of a job under failures."""

    seconds: float
    steps: int
    losses: int
    repeated: int
    """Steps that ran again."""
    useful: float
    """Time that the steps would have taken without failures, as a fraction of ``seconds``."""


def goodput(
    step_seconds: Callable[[int], float | None],
    devices: int,
    elastic: bool,
    failures: Failures,
    steps: int,
    replicate_every: int = 0,
) -> Goodput:
    """Progress of ``steps`` steps under failures.

    step_seconds: time of a step on n devices; None: the job cannot run on n devices.
    elastic: the remaining devices go on after a loss.
    replicate_every: steps between replications of the state; 0: every device has the whole state.
    """
    full_step_s = step_seconds(devices)
    if full_step_s is None or not full_step_s > 0:
        raise InvalidArgument(f"step_seconds: {full_step_s} on all {devices} devices")
    generator = random.Random(failures.seed)
    scheduled = sorted(failures.at)
    now, done, alive, losses, repeated = 0.0, 0, devices, 0, 0
    returns: list[float] = []
    reshard = failures.reshard if replicate_every else 0.0
    time_limit = 100.0 * steps * full_step_s + 100 * (failures.restart + (failures.return_after or 0.0))

    def next_loss() -> float:
        rate = alive * failures.per_hour / HOUR
        random_loss = now + generator.expovariate(rate) if rate > 0 else math.inf
        return min(random_loss, scheduled[0] if scheduled else math.inf)

    loss = next_loss()
    while done < steps and now < time_limit:
        step_s = step_seconds(alive)
        if step_s is None:  # too few devices: wait until one is back
            if not returns:
                break
            now, alive = heapq.heappop(returns) + failures.restart, alive + 1
            loss = next_loss()
            continue
        until = min(loss, returns[0] if returns else math.inf)
        completed = steps - done if until == math.inf else max(0, min(steps - done, math.floor((until - now) / step_s)))
        now, done = now + completed * step_s, done + completed
        if done == steps:
            break
        if returns and until == returns[0]:
            heapq.heappop(returns)
            now, alive = max(now, until) + failures.pause + reshard, alive + 1
        else:
            losses += 1
            if scheduled and until == scheduled[0]:
                scheduled.pop(0)
            now, alive = max(now, until) + failures.pause, alive - 1
            if failures.return_after is not None:
                heapq.heappush(returns, now + failures.return_after)
            if elastic and replicate_every:
                back = done - done % replicate_every
                repeated, done = repeated + done - back, back
                now += reshard
            elif elastic:
                now += step_s / (alive + 1)  # the lost device's part of the step runs again
            else:
                back = done - done % failures.checkpoint_every
                repeated, done = repeated + done - back, back
                now += failures.restart
                if returns:  # the restart waits for the lost device
                    now, alive = max(now, heapq.heappop(returns)), alive + 1
        loss = next_loss()
    return Goodput(now, done, losses, repeated, done * full_step_s / now if now else 1.0)
