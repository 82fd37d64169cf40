"""Copies of the state of ranks that hold parts of a model, made after every step in case one is lost: what they cost.

    rank 0 ── its state ──▶ rank 1 ── its state ──▶ rank 2 ── its state ──▶ rank 0

As the engine makes them (engine/survival/mirrors.py): each rank copies what it holds for itself, and sends it to the
next one unless a replica has it too. Data parallel needs none: everybody has everything.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from hoop.config import format_size
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.plan.plan import Plan, split_evenly
from hoop.simulate.costs import Costs
from hoop.simulate.machine import Machine


@dataclass(frozen=True)
class Mirroring:
    """How copies are made."""

    copies: int = 1
    """That a rank makes of its own state, after each step."""
    kept: int = 2
    """Of its own and of its neighbour's, in memory: while one is written the other is whole."""
    overlapped: bool = False
    """Whether a rank goes on with the next step before its neighbour's copy is there."""

    def __post_init__(self) -> None:
        if self.copies < 0 or self.kept < 1:
            raise InvalidArgument(f"mirroring: {self} copies less than nothing, or keeps none")


class Mirrors:
    """What each rank copies under a plan, for a model that is cut at ``cuts``."""

    def __init__(self, how: Mirroring, plan: Plan, costs: Costs, cuts: Sequence[int]) -> None:
        self.how, self._size, self._machine = how, plan.size, costs.machine
        self.state = _states(plan, costs, cuts)
        apart = bool(plan.servers) or any(len(ranks) == 1 for ranks in plan.holders)
        self._travels = plan.size > 1 and apart

    def sent(self, rank: int) -> int:
        """Bytes that go to the next rank."""
        return self.state[rank] if self._travels else 0

    def received(self, rank: int) -> int:
        return self.sent(rank - 1)

    def following(self, rank: int) -> int:
        return (rank + 1) % self._size

    def seconds(self, rank: int) -> float:
        """A rank's copies for itself."""
        machine: Machine = self._machine
        return self.how.copies * (machine.keep_s + machine.copy(self.state[rank]))

    def memory(self, held: Sequence[int], room: Sequence[int | None]) -> list[int]:
        """What ranks hold with the copies; raises where one is too small for them."""
        found = []
        for rank, (own, cap) in enumerate(zip(held, room, strict=True)):
            copies = self.how.kept * (self.state[rank] + self.received(rank))
            found.append(own + copies)
            if cap is not None and own + copies > cap:
                raise FailedPrecondition(
                    f"memory: device {rank} needs {format_size(own)}, and {format_size(copies)} for copies of what it "
                    f"and its neighbour hold, and has {format_size(cap)}; without copies (--no-mirror) it fits, "
                    "and the loss of a device ends the run"
                )
        return found


def _states(plan: Plan, costs: Costs, cuts: Sequence[int]) -> list[int]:
    """Bytes of weights and optimizer state at each rank: a server's slice, or the stages that it holds."""
    each = [
        sum(one.weight_bytes + one.optimizer_bytes for one in costs.blocks[low:high])
        for low, high in itertools.pairwise([*cuts, len(costs.blocks)])
    ]
    found = [0] * plan.size
    for stage, ranks in enumerate(() if plan.servers else plan.holders):
        for rank in ranks:
            found[rank] += each[stage]
    for rank, part in zip(plan.servers, split_evenly(sum(each), max(1, len(plan.servers))), strict=False):
        found[rank] = len(part)
    return found
