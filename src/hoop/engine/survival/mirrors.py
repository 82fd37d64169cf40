"""What keeps a state alive whose device dies: a mirror of it at another rank, its holder.

    rank 0 ── this step's summed gradient ──▶ rank 1 ── … ──▶ rank 2 ── … ──▶ rank 0      (1) a step is computed
                                    all ranks meet                                        (2) it is done, everywhere
    each updates what it holds; and, while it waits for something else, its mirror        (3)

Nobody updates before all have met, and who has come there has another's gradient. So when a device is lost, either
nobody has updated, and every state is whole as it was before the step, here or in a mirror; or everybody can, and every
state is whole as it is after it. ``plan.recovery`` finds out which.

Where ranks meet only every so many steps (asynchronous strategies) updates do not wait: each keeps a copy of what it
had when all last met, and sends all of its state when they meet again, to where the mirror before the last one was.

What several ranks hold anyway, the replicas of a hybrid, need not travel.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from functools import partial

import numpy as np
from torch import nn

from hoop.collectives.reduction import Array
from hoop.config import format_size
from hoop.engine.job import names_of
from hoop.engine.role import Role
from hoop.engine.settings import Settings
from hoop.engine.stages.weights import Vectors
from hoop.engine.survival.image import Image, Mirror, Receive, imaged
from hoop.engine.survival.own import COPIES
from hoop.engine.survival.parts import Bytes, Part, described, size_of
from hoop.engine.survival.word import gathered
from hoop.engine.world import World
from hoop.errors import FailedPrecondition
from hoop.memory.claims import NOTHING
from hoop.plan.mirroring import holders, shares
from hoop.plan.partition import Block
from hoop.plan.plan import Plan
from hoop.strategies.fitting import Fit
from hoop.transport.base import SharedEndpoint


class Mirrors:
    """The mirrors that one rank holds, and what it does for its own."""

    def __init__(
        self, world: World, vectors: Vectors, role: Role, model: nn.Module, settings: Settings
    ) -> None:
        """All ranks must make theirs together."""
        self._endpoint, self._timeout = world.communicator.endpoint, settings.timeout_s
        self._role, self._model, self._follows = role, model, follows(role)
        holding = holders(world.size, world.hosts)
        self._holder = holding[world.rank]
        image, arrays = self._imaged()
        self._sends = role.travels and self._holder != world.rank and bool(arrays)
        told = gathered(world.communicator, vars(image) if self._sends else None, self._timeout)
        self._theirs = {
            owner: [
                Mirror(Image.heard(said), vectors, f"mirror{owner}.{turn}", settings.optimizer, self._follows)
                for turn in range(1 if self._follows else 2)
            ]
            for owner, said in enumerate(told)
            if said is not None and holding[owner] == world.rank
        }
        seen = self._endpoint.arenas if isinstance(self._endpoint, SharedEndpoint) else []
        self._seen: list[Bytes] = [one for one in seen if one is not None]
        """Everybody's memory, where all see it."""
        if len(self._seen) < world.size:
            self._seen = []
        self._own: Part | None = None
        if not self._follows:
            pieces = described(role.state(model))
            data: Bytes = vectors.new("own", size_of(pieces) // 4).view(np.uint8)
            self._own = Part(pieces, data)
        self._begun = False

    def _imaged(self) -> tuple[Image, list[Bytes]]:
        names = names_of(self._model)
        counters = [names[id(one)] for one, _ in self._role.counters()]
        return imaged(self._role.flats(), counters, self._role.state(self._model))

    def keep(self, step: int, rate: float) -> None:
        """(1): what was made since the last time is at the holder too, and another's here; every rank must call it."""
        deadline = time.monotonic() + self._timeout
        changes = self._begun and self._follows
        self.go_on()
        if self._sends:
            for array in self._changes() if changes else self._imaged()[1]:
                if array.nbytes:
                    self._endpoint.send(self._holder, array.view(np.uint8).data, deadline)
        for owner, turns in self._theirs.items():
            receive = partial(self._endpoint.recv_into, owner, deadline=deadline)
            if changes:
                self._hear(owner, turns[0], receive)
                turns[0].due(step, rate)
            else:
                turns.append(turns.pop(0))
                turns[-1].take(receive, step)
        self._endpoint.flush(deadline)
        self._begun = True

    def _changes(self) -> list[Array]:
        """What the holder is told: gradients, or where they are in memory that it sees; and what is counted."""
        totals = [one.total for one in self._role.flats()]
        counts = [later.contiguous().view(-1).numpy().view(np.uint8) for _, later in self._role.counters()]
        if self._seen:
            self._role.worker.sent += sum(one.nbytes for one in totals)
            start = _address(self._seen[self._endpoint.rank])
            totals = [np.array([_address(one) - start for one in totals], np.int64)]
        return totals + ([np.concatenate(counts)] if counts else [])

    def _hear(self, owner: int, mirror: Mirror, receive: Receive) -> None:
        """The same, from the other side."""
        places = np.empty(len(mirror.totals) if self._seen else 0, np.int64)
        if places.size:
            receive(places.view(np.uint8).data)
            for place, total in zip(places.tolist(), mirror.totals, strict=True):
                np.copyto(total, self._seen[owner][place : place + total.nbytes].view(np.float32))
        for total in mirror.totals if not self._seen else ():
            if total.size:
                receive(total.view(np.uint8).data)
        if mirror.counts.size:
            receive(mirror.counts.data)

    def go_on(self) -> None:
        """(3): mirrors are updated with what has come for them."""
        for turns in self._theirs.values():
            turns[-1].go_on()

    def set_aside(self, step: int) -> None:
        """Steps begin that change what is held here before all meet again."""
        if self._own is not None and self._own.step != step:
            self._own.take(self._role.state(self._model), step)

    def apart(self) -> list[Part]:
        """All that is whole, in memory of its own."""
        found = [one for turns in self._theirs.values() for mirror in turns for one in mirror.apart()]
        if self._own is not None and self._own.step != NOTHING:
            found.append(self._own.apart())
        return found


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def follows(role: Role) -> bool:
    """Whether updates can wait until all ranks meet, and mirrors are made by doing them again."""
    return role.stride == 1


def check_room(
    plan: Plan,
    fit: Fit,
    blocks: Sequence[Block],
    memory: Sequence[int],
    hosts: Sequence[Hashable] = (),
    outlives: bool = False,
) -> None:
    """Raises where mirrors, and copies for a device's next life, do not fit beside what is trained."""
    copies = [0] * plan.size
    each = zip(shares(plan, fit.stages, blocks), holders(plan.size, hosts), strict=True)
    for rank, (share, holder) in enumerate(each):
        if fit.strategy.synchronous:
            copies[holder] += (share.state + share.change) * (holder != rank)
        else:
            copies[holder] += 2 * share.state * (holder != rank)
            copies[rank] += share.state
        copies[rank] += COPIES * share.state * outlives
    for rank, (held, room) in enumerate(zip(fit.bytes, memory, strict=True)):
        if held + copies[rank] > room:
            raise FailedPrecondition(
                f"memory: device {rank} needs {format_size(held)}, and {format_size(copies[rank])} for mirrors of what "
                f"others hold, and has {format_size(room)}; without mirrors (--no-mirror) it fits, and the loss of a "
                "device ends the run"
            )
