"""Which faults happen, when and to whom: drawn from a seed, so that a run can be had again.

kill          a device is killed (SIGKILL); another one is started
stop          a device is stopped (SIGSTOP) until it is taken for dead, and then goes on
slow          a device gets a third of its time for a while; nobody may take it for dead
join          one device more
leave         a device is told to leave (SIGTERM), hands over, and ends with code 0
coordinator   the coordinator is killed, and started again on its journal
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument

KINDS = ("kill", "stop", "slow", "join", "leave", "coordinator")
WEIGHTS = {"kill": 4, "stop": 2, "slow": 1, "join": 1, "leave": 2, "coordinator": 2}
GAP_STEPS = (3, 60)
"""Between the end of one fault's consequences and the next fault."""


@dataclass(frozen=True)
class ScheduledFault:
    """One fault that will happen."""

    number: int
    kind: str
    gap: int
    """Steps before it."""
    victim: float
    """Which of the devices that are there, as a share of them."""

    def of(self, devices: Sequence[int]) -> int:
        """The device that it befalls."""
        return sorted(devices)[int(self.victim * len(devices))]


def draw_schedule(faults: int, seed: int, kinds: Sequence[str] = KINDS) -> list[ScheduledFault]:
    """So many faults."""
    if unknown := sorted(set(kinds) - set(KINDS)) or not kinds:
        raise InvalidArgument(f"kinds: {unknown or 'none'}; there are {', '.join(KINDS)}")
    draw = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    return [
        ScheduledFault(number, draw.choices(list(kinds), weights)[0], draw.randint(*GAP_STEPS), draw.random())
        for number in range(1, faults + 1)
    ]
