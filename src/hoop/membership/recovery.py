"""The recovery agreement, for every strategy: from which step all ranks continue, and which rank provides which slice.

    (1) after a membership change each rank makes its ``RankStatus``; all ranks gather all statuses
    (2) each rank computes the same ``RecoveryPlan`` from them, with ``agree``

The plan continues at the newest step whose state is complete and that a survivor knows to be done by all ranks; if
there is none, at another step whose state is complete. Before the first step it is the initial model. A slice is a
whole tensor or a part of one. In data parallel every rank has the whole state, which is one slice, ``WHOLE``. Later
steps are run again on the same samples. A step's result depends neither on the partition of the model nor on which rank
computes a shard, so the weights are those of an undisturbed run.

Which devices take part, and with which rank: ``job_membership.py``. Pure: no torch, no links.
``engine/fault_tolerance/recovery.py`` exchanges the statuses and moves the slices; ``tests/model/recovery_model.py``
runs the same function in virtual time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

NO_STATE = -1
"""Number of steps done by a rank without state."""
OWN_ARENA = "its own arena"
_MAX_NAMES = 3
"""Maximum number of missing tensors that an error names."""
_MAX_RANKS = 16
"""Maximum number of ranks that an error describes."""


class SliceSpec(NamedTuple):
    """Describes a slice: ``elements`` elements of tensor ``name`` from element ``low`` on, ``bytes`` bytes in all."""

    name: str
    low: int
    elements: int
    bytes: int

    @property
    def high(self) -> int:
        return self.low + self.elements


WHOLE = SliceSpec("", 0, 1, 0)
"""The slice that is the whole state, in data parallel."""


class StateLost(Exception):
    """No step's state is complete at the ranks that take part in the agreement. The text names missing tensors."""

    def __init__(self, what: str, found: str) -> None:
        """``found``: what each rank has, for the user's error."""
        super().__init__(what)
        self.found = found


@dataclass(frozen=True)
class RankStatus:
    """The status that one rank sends to all ranks in (1)."""

    device: int
    done: int
    """Newest step that this rank knows to be done by all ranks; ``NO_STATE`` if it knows none."""
    epoch_end: int
    """Number of steps done at the newest epoch end that this rank has processed (evaluation, snapshot)."""
    survived: bool
    """True if this rank took part before. False if it has just joined, or was restarted or left out meanwhile."""
    offers: Sequence[tuple[int, Sequence[SliceSpec]]]
    """Steps, and for each the slices of the state after it that this rank can provide."""
    computed: Sequence[int] = ()
    """Data parallel: shards of the step after ``done`` whose gradients this rank has, in order of computation."""
    stopped: bool = False
    """True if all ranks had agreed to stop."""
    reshard_count: int = 0
    """Number of times that this rank has taken part in such an agreement."""
    fresh_start: bool = False
    """True if the run began with the initial model, not with a checkpoint: before the first step no state can be
    lost."""
    first_size: int = 0
    """Number of ranks with which the run began, if this rank is one of them; else 0."""
    sharded_update: bool = False
    """Data parallel: True if this rank updates a slice of the weights, as all ranks have agreed when the run began."""

    @classmethod
    def from_json(cls, message: Mapping[str, Any]) -> RankStatus:
        offers = [(step, [SliceSpec(*one) for one in slices]) for step, slices in message["offers"]]
        return cls(**{**message, "offers": offers})

    def offered(self, step: int) -> list[SliceSpec]:
        return [spec for one, slices in self.offers if one == step for spec in slices]

    def describe(self) -> str:
        """What this rank has, for an error."""
        counts = ((len(slices), step) for step, slices in self.offers)
        found = ", ".join(f"{count} slice{'' if count == 1 else 's'} of step {step}" for count, step in counts)
        if found:
            found += "" if self.survived else " from before it was left out or restarted"
        elif self.fresh_start and self.first_size:
            found = "no state: it began with the run, and never got its part of the model"
        else:
            found = f"no state{': it was being overwritten' if self.survived else ''}"
        return f"device {self.device} has {found}"


@dataclass(frozen=True)
class RecoveryPlan:
    """The plan that every rank computes in (2)."""

    step: int
    """Number of steps after which all ranks continue."""
    epoch_end: int
    """Number of steps done at the newest epoch end that all ranks have processed; they process a later one again,
    together."""
    sources: Mapping[SliceSpec, int]
    """Rank that provides each slice; empty if the run begins with the initial model."""
    done: tuple[int, ...]
    """Number of steps done by each rank: ``step`` if it has that state, ``step - 1`` if it can catch up by one update,
    else ``NO_STATE``."""
    computed: tuple[tuple[int, ...], ...] = ()
    """Shards of the next step whose gradients each rank has."""
    returned: tuple[int, ...] = ()
    """Ranks that have the state after ``step`` and did not survive: it comes from their arenas."""
    devices: tuple[int, ...] = ()
    """Device id of each rank."""
    stopped: bool = False
    reshard_count: int = 1
    all_restarted: bool = False
    """True if there is no survivor."""
    source: str = field(default="", compare=False)
    """Text that says where this rank's state comes from; empty if it never lost it."""

    @property
    def root(self) -> int:
        """Data parallel: the rank that provides the state."""
        return self.sources[WHOLE]

    @property
    def behind(self) -> tuple[int, ...]:
        """Data parallel: ranks that lack the last update, and catch up with the sum of its gradients."""
        return tuple(rank for rank, done in enumerate(self.done) if done not in (NO_STATE, self.step))

    @property
    def new(self) -> tuple[int, ...]:
        """Data parallel: ranks that need the whole state."""
        return tuple(rank for rank, done in enumerate(self.done) if done == NO_STATE)

    def source_of(self, rank: int) -> str:
        """Data parallel: where a rank's state comes from; empty if it never lost it."""
        if rank in self.returned:
            return OWN_ARENA
        return f"device {self.devices[self.root]}" if rank in self.new else ""

    def missing_shards(self, shards: int) -> list[int]:
        """Shards of the step under way that no rank has; empty if no rank has any, and the step begins again."""
        held = {shard for one in self.computed for shard in one}
        return [shard for shard in range(shards) if shard not in held] if held else []


def agree(statuses: Sequence[RankStatus], whole: Mapping[str, int]) -> RecoveryPlan:
    """(2): the plan, from all ranks' statuses; the same at every rank. Raises ``StateLost``.

    ``whole``: number of elements of each tensor of the state.
    """
    survivors = [one for one in statuses if one.survived and one.done != NO_STATE]
    old = survivors or [one for one in statuses if one.offers] or _first_ranks_without_state(statuses)
    if not old:
        raise StateLost("everything", _describe(statuses))
    newest = max(one.done for one in survivors or statuses)
    steps = {step for one in statuses for step, _ in one.offers}
    lost = list(whole)
    for step in _preferred(steps, newest):
        sources = _sources(statuses, step, whole)
        missing = uncovered(whole, sources)
        if not missing:
            return _make_plan(statuses, old, step, sources)
        lost = min(missing, lost, key=len)
    if all(one.fresh_start for one in old) and (0 in steps or not steps):
        return _make_plan(statuses, old, 0, {})
    more = f" and {len(lost) - _MAX_NAMES} more" if len(lost) > _MAX_NAMES else ""
    raise StateLost((", ".join(lost[:_MAX_NAMES]) or "everything") + more, _describe(statuses))


def _first_ranks_without_state(statuses: Sequence[RankStatus]) -> list[RankStatus]:
    """The ranks that the run began with, if all are here and none of them ever had state; else none.

    Then no rank has done a step: a generation that does steps contains a first rank, which has state as long as its
    task runs. If a first rank is absent, it may be the one that has state.
    """
    first = [one for one in statuses if one.fresh_start and one.first_size and not one.offers]
    return first if first and len(first) == first[0].first_size else []


def _describe(statuses: Sequence[RankStatus]) -> str:
    more = [f"{len(statuses) - _MAX_RANKS} more devices"] if len(statuses) > _MAX_RANKS else []
    return "; ".join([*(one.describe() for one in statuses[:_MAX_RANKS]), *more])


def _preferred(steps: Iterable[int], newest: int) -> list[int]:
    """``newest``, which a survivor knows to be done, and older steps, newest first; then later steps, oldest first.

    A later step is as good (its result is determined), but its losses may be lost with the rank that knew them.
    """
    return sorted(steps, key=lambda step: (step > newest, abs(newest - step)))


def uncovered(whole: Mapping[str, int], slices: Iterable[SliceSpec]) -> list[str]:
    """Names of the tensors that these slices do not cover completely."""
    ranges: dict[str, list[tuple[int, int]]] = {}
    for one in slices:
        ranges.setdefault(one.name, []).append((one.low, one.high))
    missing = []
    for name, count in whole.items():
        covered = 0
        for low, high in sorted(ranges.get(name, [])):
            if low <= covered:
                covered = max(covered, high)
        if covered < count or name not in ranges:
            missing.append(name)
    return missing


def _sources(statuses: Sequence[RankStatus], step: int, whole: Mapping[str, int]) -> dict[SliceSpec, int]:
    """The rank that provides each slice of this step: a survivor if one has it, of these the lowest rank.

    A rank that was left out or restarted provides only tensors that the survivors lack. With an asynchronous strategy
    its state after this step may be another one: the survivors may have gone back and done the step again.
    """
    found: dict[bool, dict[SliceSpec, int]] = {True: {}, False: {}}
    for rank, one in enumerate(statuses):
        for spec in one.offered(step):
            found[one.survived].setdefault(spec, rank)
    lacking = set(uncovered(whole, found[True]))
    others = {spec: rank for spec, rank in found[False].items() if spec.name in lacking}
    return others | found[True]  # in this order: where slices overlap, the survivors' are written last


def _make_plan(
    statuses: Sequence[RankStatus], old: Sequence[RankStatus], step: int, sources: dict[SliceSpec, int]
) -> RecoveryPlan:
    has_state = [bool(one.offered(step)) for one in statuses]
    # Only a survivor at ``step`` has the sum of that step's gradients, and only a survivor one step behind can use it.
    summed = any(one.survived and here for one, here in zip(statuses, has_state, strict=True))
    done = []
    for one, here in zip(statuses, has_state, strict=True):
        catches_up = summed and one.survived and one.done == step - 1
        done.append(step if here else step - 1 if catches_up else NO_STATE)
    current = [one for one, here in zip(statuses, done, strict=True) if one in old and here != NO_STATE]
    return RecoveryPlan(
        step,
        min(min(one.epoch_end for one in current or old), step),
        sources,
        tuple(done),
        # Shards of a rank that is behind belong to a step that is over.
        tuple(tuple(one.computed) if one.survived and one.done == step else () for one in statuses),
        tuple(rank for rank, one in enumerate(statuses) if has_state[rank] and not one.survived),
        tuple(one.device for one in statuses),
        any(one.stopped for one in old),
        1 + max(one.reshard_count for one in old),
        not any(one.survived for one in statuses),
    )
