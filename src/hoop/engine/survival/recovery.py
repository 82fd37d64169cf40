"""A member was lost in the middle of a step: those who are left keep what they have, and finish the same step.

    (1) everybody tells how many steps it has done, and which shards of the next one it has computed
    (2) whoever is a step behind gets the total that the others updated with, and updates with it too
    (3) the shards that nobody has any more are dealt out; the same tree is summed: the same bits

Where a rank can be when the news reaches it: it computes or waits for the others with all its shards in their slots
(nothing is lost), or it has updated while somebody else was still waiting to hear that all were done. Ranks are never
further apart than that, because a sum needs everybody; one who is was thought dead, or restarted, and comes back
with nothing that is worth keeping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hoop.collectives.catalog import Operation
from hoop.collectives.communicator import Communicator
from hoop.collectives.shards import Holding, holding
from hoop.engine.worker import Worker
from hoop.errors import MembershipChanged, PeerError
from hoop.memory.dtypes import dtype
from hoop.plan.instructions import Instruction, Kind
from hoop.plan.plan import Plan, split_evenly
from hoop.strategies.data_parallel import whole_model

UNSEATS = (PeerError, MembershipChanged)
"""What makes a rank look for another seat: a peer or a link failed; or a peer has one of a later generation."""
NEW = -1
"""The steps done by a rank that has just come."""


@dataclass(frozen=True)
class Standing:
    """Where everybody is, after (1)."""

    done: tuple[int, ...]
    """Steps that each rank has done."""
    computed: tuple[tuple[int, ...], ...]
    """Shards of the step after the last one done that each rank holds, in the order it computed them."""
    ended: int
    """The end of an epoch up to which everybody has come: what came after is done again, together."""

    @property
    def lead(self) -> int:
        return max(self.done)

    @property
    def behind(self) -> tuple[int, ...]:
        return tuple(rank for rank, done in enumerate(self.done) if NEW < done < self.lead)

    @property
    def new(self) -> tuple[int, ...]:
        """Those who have just come, and have nothing yet."""
        return tuple(rank for rank, done in enumerate(self.done) if done == NEW)

    def missing(self, shards: int) -> list[int]:
        """Shards that nobody holds any more of a step that was under way; none, where the next one is begun anew."""
        held = {shard for one in self.computed for shard in one}
        return [shard for shard in range(shards) if shard not in held] if held else []


def level(worker: Worker, done: int, ended: int, rate: Callable[[int], float]) -> Standing:
    """(1) and (2): where everybody was; afterwards all have done as many steps."""
    communicator, settings = worker.world.communicator, worker.settings
    shards, timeout = settings.micros, settings.timeout_s
    standing = compare(communicator, done, ended, worker.computed, shards, timeout)
    if standing.behind:
        catch_up(worker, communicator, standing, rate(standing.lead - 1), timeout)
    hand_over(worker, communicator, standing, timeout)
    return standing


def compare(
    communicator: Communicator, done: int, ended: int, computed: Sequence[int], shards: int, timeout: float
) -> Standing:
    """(1)"""
    mine = np.full(2 + shards, -1, np.int64)
    mine[:2] = done, ended
    mine[2 : 2 + len(computed)] = computed
    seen = np.zeros(communicator.size * mine.size, np.int64)
    communicator.run(Operation("all_gather", mine.size, dtype("int64")), mine, seen, timeout)
    rows = seen.reshape(communicator.size, -1).tolist()
    lead = max(row[0] for row in rows)
    for row in rows:
        if lead - row[0] > 1:  # the others went on without it while it was away: it gets all it needs
            row[0] = NEW
    # What somebody behind has computed is of a step that is over.
    held = tuple(tuple(shard for shard in row[2:] if shard >= 0) if row[0] == lead else () for row in rows)
    together = min(row[1] for row in rows if row[0] != NEW)
    return Standing(tuple(row[0] for row in rows), held, together)


def catch_up(
    worker: Worker, communicator: Communicator, standing: Standing, rate: float, timeout: float
) -> None:
    """(2): the total of the last step, and by what it was shortened, from one who has it to all who have not."""
    held = worker.held[0]
    root = standing.done.index(standing.lead)
    given = np.append(held.total, np.float32(worker.last_scale)).astype(np.float32)
    operation = Operation("broadcast", given.size, dtype("float32"), root=root)
    communicator.run(operation, given, given, timeout)
    if communicator.rank in standing.behind:
        held.total = held.room
        held.room[:] = given[:-1]
        held.finish(rate, standing.lead - 1, float(given[-1]))
        worker.updated, worker.last_scale = standing.lead, float(given[-1])


def hand_over(worker: Worker, communicator: Communicator, standing: Standing, timeout: float) -> None:
    """Weights, buffers, optimizer state and counters, from one who has them to those who have just come."""
    if not standing.new:
        return
    held = worker.held[0]
    root = standing.done.index(standing.lead)
    vectors = [held.state_array, *(moment.numpy() for moment in held.moments)]
    counters = np.array([float(one) for one in held.layout.counters], np.float32)
    for vector in [*vectors, counters]:
        if vector.size:
            given = (
                vector if communicator.rank == root or communicator.rank in standing.new else vector.copy()
            )
            operation = Operation("broadcast", given.size, dtype("float32"), root=root)
            communicator.run(operation, given, given, timeout)
    if communicator.rank in standing.new:
        for one, value in zip(held.layout.counters, counters.tolist(), strict=True):
            one.fill_(value)
        worker.updated = standing.lead


def rest_of_step(
    standing: Standing, shards: int, room: int
) -> tuple[Plan, list[Holding], list[tuple[int, ...]]]:
    """(3): what everybody does in addition, what everybody holds then, and what of it it has already.

    Where a rank has no room for what that leaves it with, all begin the step anew.
    """
    size = len(standing.done)
    kept = list(standing.computed)
    more = _dealt(kept, shards)
    holdings = [holding([*old, *new], shards) for old, new in zip(kept, more, strict=True)]
    if max(one.slots for one in holdings) > room:
        kept = [()] * size
        more = [tuple(part) for part in split_evenly(shards, size)]
        holdings = [holding(new, shards) for new in more]
    end = (Instruction(Kind.REDUCE, 0), Instruction(Kind.UPDATE, 0))
    ranks = tuple((*whole_model(new), *end) for new in more)
    return Plan(shards, (tuple(range(size)),), ranks), holdings, kept


def _dealt(kept: Sequence[tuple[int, ...]], shards: int) -> list[tuple[int, ...]]:
    """Shards that nobody has, to those who have least first."""
    held = {shard for one in kept for shard in one}
    missing = [shard for shard in range(shards) if shard not in held]
    more: list[tuple[int, ...]] = [()] * len(kept)
    order = sorted(range(len(kept)), key=lambda rank: (len(kept[rank]), rank))
    for rank, part in zip(order, split_evenly(len(missing), len(kept)), strict=True):
        more[rank] = tuple(missing[index] for index in part)
    return more
