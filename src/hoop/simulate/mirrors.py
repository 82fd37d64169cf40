"""Mirrors of what ranks hold of a model, in case one is lost: what they cost.

    rank 0 ── its gradient ──▶ rank 1 ── its gradient ──▶ rank 2 ── its gradient ──▶ rank 0

As the engine keeps them (engine/survival/mirrors.py): after each step a rank's holder gets the summed gradient and,
when it would wait, makes the same update. Asynchronous strategies set their state aside and send all of it, whenever
all meet. What replicas have does not travel; data parallel needs none at all.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from hoop.config import format_size
from hoop.errors import FailedPrecondition
from hoop.plan.mirroring import holders, shares
from hoop.plan.partition import Stage
from hoop.plan.plan import Plan
from hoop.simulate.costs import Costs

_PLACE = 8.0
"""Bytes that say where something lies."""


class Mirrors:
    """What each rank does for mirrors under a plan, for a model that is cut into these stages."""

    def __init__(
        self,
        plan: Plan,
        costs: Costs,
        stages: Sequence[Stage],
        synchronous: bool,
        hosts: Sequence[Hashable] = (),
    ) -> None:
        self._costs, self.follow = costs, synchronous
        self._shares = shares(plan, stages, costs.partition_blocks())
        self._holders = holders(plan.size, hosts)
        self._owners: list[list[int]] = [[] for _ in range(plan.size)]
        for owner, holder in enumerate(self._holders):
            if self.sent(owner):
                self._owners[holder].append(owner)

    def holder(self, rank: int) -> int:
        return self._holders[rank]

    def sent(self, rank: int) -> int:
        """Bytes that its holder gets: what a step's update is made with, or the state."""
        share = self._shares[rank]
        return (share.change if self.follow else share.state) if self.holder(rank) != rank else 0

    def told(self, rank: int, near: bool) -> float:
        """Bytes of the message about it: where it lies, for who is ``near`` and sees that memory."""
        return _PLACE if near and self.follow else self.sent(rank)

    def hearing(self, owner: int, near: bool) -> float:
        """Seconds in which a holder gets it."""
        machine = self._costs.machine
        copied = machine.copy(self.sent(owner)) if near and self.follow else 0.0
        return machine.message(self.told(owner, near)) + copied

    def owners(self, rank: int) -> list[int]:
        """Whose mirrors a rank holds."""
        return self._owners[rank]

    def aside(self, rank: int) -> float:
        """Seconds for a copy of what it holds, before steps after which it may not be what all have."""
        return 0.0 if self.follow else self._costs.machine.copy(self._shares[rank].state)

    def update(self, rank: int) -> float:
        """Seconds that bring what it holds of others a step further."""
        costs = self._costs
        changed = [self._shares[owner].change for owner in self.owners(rank)] if self.follow else []
        return sum(costs.update_fixed_s + costs.update_s * one for one in changed)

    def memory(self, held: Sequence[int], room: Sequence[int | None]) -> list[int]:
        """What ranks hold with mirrors; raises where one is too small for them."""
        found = []
        for rank, (own, cap) in enumerate(zip(held, room, strict=True)):
            theirs = [self._shares[owner] for owner in self.owners(rank)]
            if self.follow:
                mirrors = sum(one.state + one.change for one in theirs)
            else:
                mirrors = self._shares[rank].state + 2 * sum(one.state for one in theirs)
            found.append(own + mirrors)
            if cap is not None and own + mirrors > cap:
                raise FailedPrecondition(
                    f"memory: device {rank} needs {format_size(own)}, and {format_size(mirrors)} for mirrors of what "
                    f"others hold, and has {format_size(cap)}; without mirrors (--no-mirror) it fits, and the loss of "
                    "a device ends the run"
                )
        return found
