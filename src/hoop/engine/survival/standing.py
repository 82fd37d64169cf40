"""Where everybody is after a loss: what each rank has done, what it holds of the next step, and whose state counts.

A rank that stayed has its state, its shards and the total of its last step. One that returns on its arena has the state
of a step and nothing else; one that is new has nothing. The lead is the newest step of which anybody has the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hoop.collectives.catalog import Operation
from hoop.collectives.communicator import Communicator
from hoop.memory.dtypes import dtype

NEW = -1
"""The steps done by a rank that has just come."""
OWN_ARENA = "its own arena"


@dataclass(frozen=True)
class Standing:
    """Where everybody is, after (1)."""

    done: tuple[int, ...]
    """Steps that each rank has done."""
    computed: tuple[tuple[int, ...], ...]
    """Shards of the step after the last one done that each rank holds, in the order it computed them."""
    ended: int
    """The end of an epoch up to which everybody has come: what came after is done again, together."""
    returned: tuple[int, ...] = ()
    """Those who are where the others are by what their arenas held."""
    devices: tuple[int, ...] = ()
    """The number of each rank's device."""
    afresh: bool = False
    """Whether nobody has stayed: all have been restarted."""

    @property
    def lead(self) -> int:
        return max(self.done)

    @property
    def root(self) -> int:
        """Who gives: one that has stayed, where there is one."""
        there = [rank for rank, done in enumerate(self.done) if done == self.lead]
        return next((rank for rank in there if rank not in self.returned), there[0])

    def source(self, rank: int) -> str:
        """Where a rank has its state from; empty: it never lost it."""
        if rank in self.returned:
            return OWN_ARENA
        return f"device {self.devices[self.root]}" if rank in self.new else ""

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


class StateLost(Exception):
    """Pieces of the state are nowhere any more."""


@dataclass(frozen=True)
class Mine:
    """What one rank says in (1)."""

    done: int
    ended: int
    computed: Sequence[int]
    stays: bool
    """It took part before, and did not come with what an arena held, or with nothing."""
    device: int


def compare(communicator: Communicator, mine: Mine, shards: int, timeout: float) -> Standing:
    """(1); raises where nobody has anything."""
    said = np.full(4 + shards, -1, np.int64)
    said[:4] = mine.done, mine.ended, mine.stays, mine.device
    said[4 : 4 + len(mine.computed)] = mine.computed
    seen = np.zeros(communicator.size * said.size, np.int64)
    communicator.run(Operation("all_gather", said.size, dtype("int64")), said, seen, timeout)
    rows = seen.reshape(communicator.size, -1).tolist()
    lead = max(row[0] for row in rows)
    if lead == NEW:
        raise StateLost("everything")
    total = any(row[2] and row[0] == lead for row in rows)  # whoever stays there has it
    for row in rows:
        # The others went on without it while it was away, or it cannot be helped by a total: it gets all it needs.
        if lead - row[0] > (1 if total and row[2] else 0):
            row[0] = NEW
    # What somebody behind has computed is of a step that is over.
    held = tuple(tuple(shard for shard in row[4:] if shard >= 0) if row[0] == lead else () for row in rows)
    there = [row for row in rows if row[0] != NEW]
    together = min(row[1] for row in [row for row in there if row[2]] or there)
    returned = tuple(rank for rank, row in enumerate(rows) if row[0] == lead and not row[2])
    done, devices = (tuple(row[place] for row in rows) for place in (0, 3))
    return Standing(done, held, together, returned, devices, not any(row[2] for row in rows))
