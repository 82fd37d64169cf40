"""One agreement for every strategy: after a membership change, from which step do all ranks go on, and who provides it.

    (1) each rank makes its ``RankStatus``, and all ranks gather everybody's
    (2) each computes the same ``RecoveryPlan`` from them, by ``agree``

The newest step is chosen of which every piece of the state is there, and that a rank which stayed knows to be done;
if there is none, another step of which every piece is there.
A piece is a whole tensor or a slice of one; where every rank has all of the state (data parallel), it is one piece,
``WHOLE``. Later steps are run again, on the same samples: a step's result depends neither on how the model is
partitioned nor on which rank computes what, so the weights are those of an undisturbed run.

Pure: no torch, no links. The engine exchanges the statuses and moves the pieces; a model of it runs the same function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NO_STATE = -1
"""The steps done by a rank that has just come."""
OWN_ARENA = "its own arena"
_SHOWN = 3
"""How many of the tensors that are missing an error names."""


class SliceSpec(NamedTuple):
    """Elements of a named tensor: what is known of them without their values."""

    name: str
    low: int
    elements: int
    bytes: int

    @property
    def high(self) -> int:
        return self.low + self.elements


WHOLE = SliceSpec("", 0, 1, 0)
"""All of the state, where every rank has all of it."""


class StateLost(Exception):
    """Pieces of the state are at no rank that takes part in the agreement."""


@dataclass(frozen=True)
class RankStatus:
    """What one rank says of itself in (1)."""

    device: int
    done: int
    """The newest step that it knows to be done by all ranks; ``NO_STATE``: it has just come, without any."""
    ended: int
    """The newest end of an epoch that it has dealt with."""
    stays: bool
    """It took part before. One that was restarted may have state of its arena, and none that it computed itself."""
    offers: Sequence[tuple[int, Sequence[SliceSpec]]]
    """Steps, and the pieces of the state after them that it can provide."""
    computed: Sequence[int] = ()
    """Data parallel: the shards of the step after ``done`` whose gradients it has, in the order it computed them."""
    stopped: bool = False
    """All ranks had agreed to stop."""
    turn: int = 0
    """How often it has taken part in such an agreement."""
    begins: bool = False
    """Whether a run that has done no step begins with the model as it is made: nothing can be lost of it."""

    @classmethod
    def parsed(cls, message: Mapping[str, Any]) -> RankStatus:
        """From what JSON makes of its fields."""
        offers = [(step, [SliceSpec(*one) for one in pieces]) for step, pieces in message["offers"]]
        return cls(**{**message, "offers": offers})

    def offered(self, step: int) -> list[SliceSpec]:
        return [piece for one, pieces in self.offers if one == step for piece in pieces]


@dataclass(frozen=True)
class RecoveryPlan:
    """What all ranks know after (2)."""

    step: int
    """All go on after this many steps."""
    ended: int
    """The newest end of an epoch that all have dealt with: a later one is dealt with again, together."""
    sources: Mapping[SliceSpec, int]
    """The rank that provides each piece; empty: the run begins, with the model as it is made."""
    done: tuple[int, ...]
    """By rank: ``step`` where it has it, ``step - 1`` where it is one behind and can catch up, else ``NO_STATE``."""
    computed: tuple[tuple[int, ...], ...] = ()
    """By rank: the shards of the next step whose gradients it has."""
    returned: tuple[int, ...] = ()
    """Ranks that have the state of this step from their arenas."""
    devices: tuple[int, ...] = ()
    stopped: bool = False
    turn: int = 1
    restarted: bool = False
    """Nobody has stayed: every device has been restarted."""
    source: str = field(default="", compare=False)
    """Where this rank, which had lost its state, has it from; empty: it never lost it."""

    @property
    def root(self) -> int:
        """Data parallel: the rank that provides the state."""
        return self.sources[WHOLE]

    @property
    def behind(self) -> tuple[int, ...]:
        """Data parallel: ranks that lack the last update, and catch up by the sum of its gradients."""
        return tuple(rank for rank, done in enumerate(self.done) if done not in (NO_STATE, self.step))

    @property
    def new(self) -> tuple[int, ...]:
        """Data parallel: ranks that need all of the state."""
        return tuple(rank for rank, done in enumerate(self.done) if done == NO_STATE)

    def source_of(self, rank: int) -> str:
        """Data parallel: where a rank has its state from; empty: it never lost it."""
        if rank in self.returned:
            return OWN_ARENA
        return f"device {self.devices[self.root]}" if rank in self.new else ""

    def missing_shards(self, shards: int) -> list[int]:
        """Shards of a step under way that no rank has any more; none, where the step is begun again."""
        held = {shard for one in self.computed for shard in one}
        return [shard for shard in range(shards) if shard not in held] if held else []


def agree(statuses: Sequence[RankStatus], whole: Mapping[str, int]) -> RecoveryPlan:
    """(2), the same at every rank. ``whole``: the elements of each tensor of the state. Raises ``StateLost``."""
    stayed = [one for one in statuses if one.stays and one.done != NO_STATE]
    old = stayed or [one for one in statuses if one.offers]
    if not old:
        raise StateLost("everything")
    newest = max(one.done for one in stayed or statuses)
    steps = {step for one in statuses for step, _ in one.offers}
    lost = list(whole)
    for step in _preferred(steps, newest):
        sources = _sources(statuses, step)
        gone = uncovered(whole, sources)
        if not gone:
            return _plan(statuses, old, step, sources)
        lost = min(gone, lost, key=len)
    if all(one.begins for one in old) and (0 in steps or not steps):
        return _plan(statuses, old, 0, {})
    more = f" and {len(lost) - _SHOWN} more" if len(lost) > _SHOWN else ""
    raise StateLost((", ".join(lost[:_SHOWN]) or "everything") + more)


def _preferred(steps: Iterable[int], newest: int) -> list[int]:
    """The newest step that is known to be done, and older ones; then later ones, which nobody who stayed has seen done.

    A later step is as good (its result is determined), but its losses may have gone with the rank that knew them.
    """
    return sorted(steps, key=lambda step: (step > newest, abs(newest - step)))


def uncovered(whole: Mapping[str, int], pieces: Iterable[SliceSpec]) -> list[str]:
    """Tensors of a state that these pieces do not cover."""
    found: dict[str, list[tuple[int, int]]] = {}
    for one in pieces:
        found.setdefault(one.name, []).append((one.low, one.high))
    lost = []
    for name, count in whole.items():
        reached = 0
        for low, high in sorted(found.get(name, [])):
            if low <= reached:
                reached = max(reached, high)
        if reached < count or name not in found:
            lost.append(name)
    return lost


def _sources(statuses: Sequence[RankStatus], step: int) -> dict[SliceSpec, int]:
    """Who provides each piece: a rank that stayed, where one has it."""
    found: dict[SliceSpec, int] = {}
    for rank in sorted(range(len(statuses)), key=lambda one: not statuses[one].stays):
        for piece in statuses[rank].offered(step):
            found.setdefault(piece, rank)
    return found


def _plan(
    statuses: Sequence[RankStatus], old: Sequence[RankStatus], step: int, sources: dict[SliceSpec, int]
) -> RecoveryPlan:
    has = [bool(one.offered(step)) for one in statuses]
    # A sum of gradients is known to a rank that took part in it and updated with it, and of use to one that did not.
    summed = any(one.stays and here for one, here in zip(statuses, has, strict=True))
    done = []
    for one, here in zip(statuses, has, strict=True):
        catches_up = summed and one.stays and one.done == step - 1
        done.append(step if here else step - 1 if catches_up else NO_STATE)
    current = [one for one, here in zip(statuses, done, strict=True) if one in old and here != NO_STATE]
    return RecoveryPlan(
        step,
        min(min(one.ended for one in current or old), step),
        sources,
        tuple(done),
        # What a rank that is behind has computed is of a step that is over.
        tuple(tuple(one.computed) if one.stays and one.done == step else () for one in statuses),
        tuple(rank for rank, one in enumerate(statuses) if has[rank] and not one.stays),
        tuple(one.device for one in statuses),
        any(one.stopped for one in old),
        1 + max(one.turn for one in old),
        not any(one.stays for one in statuses),
    )
