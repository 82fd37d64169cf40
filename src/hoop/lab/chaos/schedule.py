"""The random fault schedule of a chaos run. It is drawn from a seed, so that a run can be repeated.

kill          kill a device (SIGKILL); another one is started
stop          stop a device (SIGSTOP) until it is declared dead, then continue it
slow          stop and continue a device so that it runs a third of the time; it must not be declared dead
join          start one more device
leave         ask a device to leave (SIGTERM); it hands over its state and exits with code 0
coordinator   kill the coordinator and start it again from its journal
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from hoop.errors import InvalidArgument

KINDS = ("kill", "stop", "slow", "join", "leave", "coordinator")
WEIGHTS = {"kill": 4, "stop": 2, "slow": 1, "join": 1, "leave": 2, "coordinator": 2}
GAP_STEPS = (3, 60)
"""Minimum and maximum of the steps between the end of one fault's recovery and the next fault."""


@dataclass(frozen=True)
class ScheduledFault:
    """One fault of the schedule."""

    number: int
    kind: str
    gap_steps: int
    """Steps between the previous fault and this one."""
    target_fraction: float
    """The target as a position in [0, 1) of the sorted list of living devices."""

    def target(self, devices: Sequence[int]) -> int:
        """The target among the living devices."""
        return sorted(devices)[int(self.target_fraction * len(devices))]


def draw_schedule(faults: int, seed: int, kinds: Sequence[str] = KINDS) -> list[ScheduledFault]:
    """Draw ``faults`` faults of these kinds."""
    if unknown := sorted(set(kinds) - set(KINDS)) or not kinds:
        raise InvalidArgument(f"kinds: {unknown or 'none'}; there are {', '.join(KINDS)}")
    draw = random.Random(seed)
    weights = [WEIGHTS[kind] for kind in kinds]
    return [
        ScheduledFault(number, draw.choices(list(kinds), weights)[0], draw.randint(*GAP_STEPS), draw.random())
        for number in range(1, faults + 1)
    ]
