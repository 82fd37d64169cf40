"""What keeps a state alive whose device dies: copies of it, made as steps end, here and on another device.

    rank 0 ── its state ──▶ rank 1 ── its state ──▶ rank 2 ── its state ──▶ rank 0        after every step

Who keeps whose is ``keepers``' to say: the next rank on one machine, a rank of another where there are several.

Each rank keeps its own state and its neighbour's after the last two steps, in turn. While the copies of one step travel
those of the step before are whole everywhere; and all ranks meet before the next step begins. So when a device is lost,
there is a step of which everybody's state is whole somewhere (``recut`` finds it), unless one went with its keeper.

What several ranks hold anyway, the replicas of a hybrid, need not travel; only what undoes a step is kept of it.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence

import numpy as np

from hoop.config import format_size
from hoop.engine.stages.weights import Vectors
from hoop.engine.survival.keepers import keepers
from hoop.engine.survival.parts import Bytes, Live, Part, Piece, described, rows, size_of
from hoop.engine.survival.word import gathered
from hoop.engine.world import World
from hoop.errors import FailedPrecondition
from hoop.memory.claims import NOTHING
from hoop.plan.partition import Block
from hoop.plan.plan import Plan, split_evenly
from hoop.strategies.fitting import Fit

_KEPT = 2


class Mirrors:
    """The copies that one rank keeps."""

    def __init__(
        self, world: World, vectors: Vectors, state: Sequence[Live], travels: bool, timeout: float
    ) -> None:
        """``travels``: nobody else has it. All ranks must make theirs together."""
        self._endpoint, self._timeout = world.communicator.endpoint, timeout
        keeping = keepers(world.hosts, world.size)
        self._next, self._before = keeping[world.rank], keeping.index(world.rank)
        mine = described(state)
        self._sends = travels and world.size > 1 and bool(mine)
        told = gathered(world.communicator, mine if self._sends else [], timeout)
        theirs = [Piece(*one) for one in told[self._before]]
        self._own = [_part(vectors, f"own{turn}", mine) for turn in range(_KEPT)]
        self._theirs = [_part(vectors, f"mirror{turn}", theirs) for turn in range(_KEPT)] if theirs else []
        self._turn = 0
        self._kept = False

    def keep(self, state: Sequence[Live], step: int) -> None:
        """After a step: this rank's state is kept here and at the next rank, and another's comes."""
        deadline = time.monotonic() + self._timeout
        self._kept = False
        self._turn = (self._turn + 1) % _KEPT
        own = self._own[self._turn]
        own.take(state, step)
        if self._sends:
            self._endpoint.send(self._next, own.data.data, deadline)
        if self._theirs:
            mirror = self._theirs[self._turn]
            mirror.step = NOTHING
            self._endpoint.recv_into(self._before, mirror.data.data, deadline)
            mirror.step = step
        self._endpoint.flush(deadline)
        self._kept = True

    @property
    def step(self) -> int:
        """The newest that is kept."""
        return self._own[self._turn].step if self._kept else NOTHING

    @property
    def parts(self) -> list[Part]:
        """All that is whole."""
        return [one for one in (*self._own, *self._theirs) if one.pieces and one.step != NOTHING]


def _part(vectors: Vectors, name: str, pieces: Sequence[Piece]) -> Part:
    count = size_of(pieces)
    claim = vectors.claim(name, rows(pieces, name))  # before there is anything that it could be wrong about
    data: Bytes = vectors.new(name, count // 4).view(np.uint8)[:count]
    return Part(pieces, data, claim=claim)


def check_room(
    plan: Plan, fit: Fit, blocks: Sequence[Block], memory: Sequence[int], hosts: Sequence[Hashable] = ()
) -> None:
    """Raises where the copies do not fit beside what is trained."""
    each = [
        sum(one.weight_bytes + one.optimizer_bytes for one in blocks[stage.blocks.start : stage.blocks.stop])
        for stage in fit.stages
    ]
    states = [
        0 if plan.servers else sum(each[stage] for stage in plan.held_by(rank)) for rank in range(plan.size)
    ]
    for rank, part in zip(plan.servers, split_evenly(sum(each), max(1, len(plan.servers))), strict=False):
        states[rank] = len(part)
    travel = plan.size > 1 and (bool(plan.servers) or any(len(ranks) == 1 for ranks in plan.holders))
    keeping = keepers(hosts, plan.size)
    for rank, (held, room) in enumerate(zip(fit.bytes, memory, strict=True)):
        copies = _KEPT * (states[rank] + (states[keeping.index(rank)] if travel else 0))
        if held + copies > room:
            raise FailedPrecondition(
                f"memory: device {rank} needs {format_size(held)}, and {format_size(copies)} for copies of what it "
                f"and its neighbour hold, and has {format_size(room)}; without copies (--no-mirror) it fits, "
                "and the loss of a device ends the run"
            )
