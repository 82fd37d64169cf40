"""The device's side of one job: which rank assignment its task uses, takes next, or waits for. Pure: no clock, no I/O.

    assigned, moving, released …   (state, what the coordinator said) -> state
    next_step(state)               what the training thread does when it has left the generation it was in

The coordinator's messages may come late, twice, or in another order. Generations order them: a stale assignment is
dropped for the newer one. A task ends only at the end of the training, by a failure of its own code, or because the
coordinator released it; never because its links failed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from hoop.errors import MembershipChanged


class NextStep(StrEnum):
    """What a task that uses no generation's links does."""

    WAIT = "wait"
    TAKE = "take"
    """Take the newest assignment."""
    HAND_OVER = "hand over"
    """It has no rank any more. It stays until the others have moved on: they may still read its memory."""
    LEAVE = "leave"


@dataclass(frozen=True)
class TaskRanks:
    """The assignments of one task; replaced as a whole by every message."""

    newest: int = 0
    """The newest generation it was assigned a rank in; 0: none yet."""
    taken: int = 0
    """The newest generation whose links it made."""
    planned: bool = False
    """The newest assignment is for later: until the move, the taken one stays in use."""
    move: bool = False
    """Everybody has the planned assignment: move after a step that all ranks agree on."""
    stopped: int = 0
    """The newest generation that the coordinator said is over."""
    rejoins: bool = False
    """The others went on without it; it is as good as new, and has no rank until the next assignment."""
    left_out: bool = False
    """The others went on without it before the newest assignment: what it knows may be of long ago."""
    released: bool = False
    dismissed: bool = False
    """Released for good: nobody needs what it has."""

    @property
    def pending(self) -> bool:
        """Whether there is an assignment that was not taken yet."""
        return self.newest > self.taken

    @property
    def generation(self) -> int:
        """What it tells a coordinator that asks; 0: it has no rank, and waits for one."""
        return 0 if self.rejoins else self.newest


def assigned(state: TaskRanks, generation: int, planned: bool) -> TaskRanks:
    """A rank in this generation; raises where a newer one is known."""
    if generation < state.newest:
        raise MembershipChanged(f"generation {generation} is over: this device is at {state.newest}")
    if generation == state.newest:
        return state  # said twice
    return replace(state, newest=generation, planned=planned, move=False, rejoins=False, released=False)


def stopped(state: TaskRanks, generation: int) -> TaskRanks:
    """The coordinator says that this generation, and every older one, is over."""
    return replace(state, stopped=max(state.stopped, generation))


def outdated(state: TaskRanks) -> bool:
    """Whether the links of the taken generation are of no use any more: what is done on them must fail at once."""
    superseded = state.pending and not state.planned
    return state.taken > 0 and (superseded or state.stopped >= state.taken or state.dismissed)


def moving(state: TaskRanks) -> TaskRanks:
    """Everybody has its planned rank. Without one, this is news of a move that is over."""
    return replace(state, move=state.planned and (state.pending or state.released))


def took(state: TaskRanks, generation: int) -> TaskRanks:
    """The task uses the links of this generation."""
    newest, taken = max(state.newest, generation), max(state.taken, generation)
    planned = state.planned and newest > taken  # another one came meanwhile
    return replace(state, newest=newest, taken=taken, move=False, planned=planned, left_out=False)


def rejoined(state: TaskRanks) -> TaskRanks:
    """The others went on without it, and it is asked to take part again."""
    return replace(
        state,
        taken=state.newest,
        rejoins=True,
        left_out=True,
        move=False,
        planned=False,
        released=False,
        dismissed=False,
    )


def released(state: TaskRanks, final: bool) -> TaskRanks:
    """It has no rank any more; ``final``: and nobody needs what it has."""
    return replace(state, released=True, planned=True, dismissed=state.dismissed or final)


def next_step(state: TaskRanks) -> NextStep:
    """What a task does that has left the generation it was in."""
    if state.dismissed:
        return NextStep.LEAVE
    if state.released:
        return NextStep.HAND_OVER
    return NextStep.TAKE if state.pending else NextStep.WAIT
