"""Where a device's memory outlives it: what it held after the last two steps, for who is restarted on it.

Each copy names its step in the arena, and none while it is written; ranks are a step apart at most. So should all be
killed at once, there is a step of which each has its part whole.

A rank's state as its holder keeps it: the same vectors, one after the other, so that the same update fits them.

    | weights | moment 0 | moment 1 |   of each stage, or of a server's slice   | counters, what is not trained |

It is sent whole once. From then on the holder is sent what each step's update is made with, the summed gradient (a
third of Adam's state), and makes the update itself, when it has nothing else to do: every element is updated by itself,
by the same kernel, so the bits are the same.

What keeps a state alive whose device dies: a mirror of it at another rank, its holder.

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
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from hoop.collectives.object_collectives import all_gather_object
from hoop.collectives.reduction import Array
from hoop.config import format_size
from hoop.engine.fault_tolerance.state_slices import (
    Bytes,
    FlatState,
    LiveSlice,
    StateShard,
    aligned,
    described,
    rows,
    size_of,
)
from hoop.engine.job import names_of
from hoop.engine.rank_context import RankContext
from hoop.engine.roles.base import RankRole
from hoop.engine.settings import Settings
from hoop.engine.stage.optimizer import OptimizerSettings, go_on, updating
from hoop.engine.stage.state import StateVectors
from hoop.errors import FailedPrecondition
from hoop.memory.commit_record import NO_STEP
from hoop.plan.partition import Block
from hoop.plan.plan import Plan
from hoop.plan.recovery import SliceSpec
from hoop.plan.replica_placement import replica_holders, replica_shares
from hoop.strategies.memory_fit import Fit
from hoop.transport.base import SharedEndpoint

COPIES = 2


class DoubleBufferedState:
    """The copies that one rank keeps of its own state."""

    def __init__(self, vectors: StateVectors, role: RankRole, model: nn.Module) -> None:
        self._role, self._model = role, model
        pieces = described(role.state(model))
        self._parts = [claimed(vectors, f"own{turn}", pieces) for turn in range(COPIES)]

    def take(self, step: int) -> None:
        """What is held now is the state after so many steps."""
        self._parts.append(self._parts.pop(0))
        self._parts[-1].take(self._role.state(self._model), step)


def claimed(vectors: StateVectors, name: str, pieces: Sequence[SliceSpec]) -> StateShard:
    """Room for these, of which the arena says what is in it."""
    claim = vectors.claim(name, rows(pieces, name))  # before there is anything that it could be wrong about
    return StateShard(pieces, vectors.new(name, size_of(pieces) // 4).view(np.uint8), claim=claim)


Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Receive = Callable[[memoryview], None]


@dataclass(frozen=True)
class ReplicaLayout:
    """Where everything is in it: plain values, which can be told."""

    vectors: list[tuple[int, int]]
    """Each one's place and bytes, in the order they are sent."""
    flats: list[tuple[int, int, int]]
    """Of each stage: the number of its first vector, its elements, and how many of them are trained."""
    pieces: list[tuple[SliceSpec, int]]
    """With their places."""
    counters: list[tuple[int, int]]
    """Their places and bytes."""

    @classmethod
    def heard(cls, said: dict[str, Any]) -> ReplicaLayout:
        pieces = [(SliceSpec(*piece), place) for piece, place in said["pieces"]]
        return cls(**{**said, "pieces": pieces})

    @property
    def size(self) -> int:
        return sum(aligned(count) for _, count in self.vectors)


def replica_layout(
    flats: Sequence[FlatState], counters: Sequence[str], state: Sequence[LiveSlice]
) -> tuple[ReplicaLayout, list[Bytes]]:
    """What a rank holds: where it goes in an image, and the vectors that go there; ``counters`` by name."""
    arrays: list[Bytes] = []
    firsts = []
    for flat in flats:
        firsts.append((len(arrays), len(flat.weights), flat.trained))
        arrays += [flat.weights.view(np.uint8), *(one.numpy().view(np.uint8) for one in flat.moments)]
    vectors, spans, pieces = [], [], []
    end = 0

    def add(array: Bytes, start: int) -> None:
        nonlocal end
        vectors.append((end, array.nbytes))
        spans.append((start, start + array.nbytes, end))
        end += aligned(array.nbytes)

    def place_of(address: int) -> int | None:
        return next((at + address - low for low, high, at in spans if low <= address < high), None)

    for array in arrays:
        add(array, array.__array_interface__["data"][0])
    for one, piece in zip(state, described(state), strict=True):
        place = place_of(one.elements.data_ptr())
        if place is None:  # no update goes over it
            place = end
            arrays.append(one.elements.detach().view(torch.uint8).numpy())
            add(arrays[-1], one.elements.data_ptr())
        pieces.append((piece, place))
    named = {piece.name: (place, piece.bytes) for piece, place in pieces}
    return ReplicaLayout(vectors, firsts, pieces, [named[name] for name in counters]), arrays


class Replica:
    """Another rank's state, kept here; and what brings it a step further, once that has come."""

    def __init__(
        self,
        image: ReplicaLayout,
        vectors: StateVectors,
        name: str,
        optimizer: OptimizerSettings,
        follows: bool,
    ) -> None:
        """``follows``: it will be brought further; otherwise it comes whole each time."""
        self._image = image
        self._data: Bytes = vectors.new(name, image.size // 4).view(np.uint8)
        pieces, places = [one for one, _ in image.pieces], [place for _, place in image.pieces]
        self.part = StateShard(pieces, self._data, places=places)
        self._updates = []
        self.totals: list[Floats] = []
        """Where a step's gradients are put …"""
        for number, (first, elements, trained) in enumerate(image.flats if follows else ()):
            weights = self._vector(first)
            assert len(weights) == elements, "an image is laid out as it was told"
            self.totals.append(vectors.new(f"{name}.total{number}", elements))
            moments = [torch.from_numpy(self._vector(first + 1 + one)) for one in range(optimizer.slots)]
            update = updating(optimizer, torch.from_numpy(weights[:trained]), moments)
            self._updates.append((update, weights, trained))
        self.counts: Bytes = np.empty(sum(count for _, count in image.counters), np.uint8)
        """… and what its counters are then."""
        self._due: tuple[int, float] | None = None

    def _vector(self, number: int) -> Floats:
        place, count = self._image.vectors[number]
        return self._data[place : place + count].view(np.float32)

    def take(self, receive: Receive, step: int) -> None:
        """All of it comes, as it is after so many steps."""
        self.part.step = NO_STEP
        for place, count in self._image.vectors:
            if count:
                receive(self._data[place : place + count].data)
        self.part.step = step

    def due(self, step: int, rate: float) -> None:
        """What the update to this step is made with has come."""
        assert self.part.step == step - 1, "a mirror goes on step by step"
        self._due = step, rate

    def go_on(self) -> bool:
        """Makes the update that is due; whether there was one."""
        if self._due is None:
            return False
        (step, rate), self._due = self._due, None
        self.part.step = NO_STEP
        for (update, weights, trained), total in zip(self._updates, self.totals, strict=True):
            go_on(update, weights, trained, total, rate, step - 1)
        at = 0
        for place, count in self._image.counters:
            self._data[place : place + count] = self.counts[at : at + count]
            at += count
        self.part.step = step
        return True

    def apart(self) -> list[StateShard]:
        """What is whole, in memory of its own: as it is, and as it will be."""
        found = [self.part.apart()] if self.part.step != NO_STEP else []
        return found + ([self.part.apart()] if self.go_on() else [])


class Replicator:
    """The mirrors that one rank holds, and what it does for its own."""

    def __init__(
        self, world: RankContext, vectors: StateVectors, role: RankRole, model: nn.Module, settings: Settings
    ) -> None:
        """All ranks must make theirs together."""
        self._endpoint, self._timeout = world.communicator.endpoint, settings.timeout_s
        self._role, self._model, self._follows = role, model, follows(role)
        holding = replica_holders(world.size, world.hosts)
        self._holder = holding[world.rank]
        image, arrays = self._imaged()
        self._sends = role.travels and self._holder != world.rank and bool(arrays)
        told = all_gather_object(world.communicator, vars(image) if self._sends else None, self._timeout)
        self._theirs = {
            owner: [
                Replica(
                    ReplicaLayout.heard(said),
                    vectors,
                    f"mirror{owner}.{turn}",
                    settings.optimizer,
                    self._follows,
                )
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
        self._own: StateShard | None = None
        if not self._follows:
            pieces = described(role.state(model))
            data: Bytes = vectors.new("own", size_of(pieces) // 4).view(np.uint8)
            self._own = StateShard(pieces, data)
        self._begun = False

    def _imaged(self) -> tuple[ReplicaLayout, list[Bytes]]:
        names = names_of(self._model)
        counters = [names[id(one)] for one, _ in self._role.counters()]
        return replica_layout(self._role.flats(), counters, self._role.state(self._model))

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

    def _hear(self, owner: int, mirror: Replica, receive: Receive) -> None:
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

    def apart(self) -> list[StateShard]:
        """All that is whole, in memory of its own."""
        found = [one for turns in self._theirs.values() for mirror in turns for one in mirror.apart()]
        if self._own is not None and self._own.step != NO_STEP:
            found.append(self._own.apart())
        return found


def _address(array: Array) -> int:
    return int(array.__array_interface__["data"][0])


def follows(role: RankRole) -> bool:
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
    each = zip(replica_shares(plan, fit.stages, blocks), replica_holders(plan.size, hosts), strict=True)
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
