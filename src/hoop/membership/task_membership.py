"""A device's rank assignments in one job: which one it uses, takes next, or waits for. Pure: no clock, no I/O.

    assigned, moving, released …   (state, message of the coordinator) -> state
    next_step(state)               the next action of a training thread that has left its generation

The coordinator's messages may come late, twice, or in another order. Each has the newest generation of the job, by
which they are ordered: a newer one replaces a stale one, and what is older than the newest message is void. A task ends
only at the end of the training, by a failure of its own code, or because the coordinator released it; never because its
links failed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hoop.errors import MembershipChanged
from hoop.membership.fast_replace import replace


class NextStep(StrEnum):
    """The next action of a task that uses no generation's links."""

    WAIT = "wait"
    TAKE = "take"
    """It takes the newest assignment."""
    HAND_OVER = "hand over"
    """It has no rank any more. It stays until the other ranks have moved: they may still read its memory."""
    LEAVE = "leave"


@dataclass(frozen=True)
class TaskRanks:
    """The rank assignments of one task. Immutable."""

    newest: int = 0
    """Newest generation in which the task was assigned a rank; 0: none yet."""
    known: int = 0
    """Newest generation in any message about this task's rank: older messages are void."""
    taken: int = 0
    """Newest generation whose links the task opened."""
    planned: bool = False
    """True if the newest assignment is for later: the taken one stays in use until the move."""
    move: bool = False
    """True if all members have the planned assignment: move after a step that all ranks agree on."""
    stopped: int = 0
    """Newest generation that the coordinator has stopped."""
    rejoins: bool = False
    """True if other devices continued without it. Like a new device, it has no rank until the next assignment."""
    left_out: bool = False
    """True if other devices continued without it before the newest assignment: its state may be old."""
    released: bool = False
    dismissed: bool = False
    """True if it was released for good: no other device needs its state."""

    @property
    def pending(self) -> bool:
        """Whether there is an assignment that it has not taken yet."""
        return self.newest > self.taken

    @property
    def generation(self) -> int:
        """The generation that the device reports to a coordinator; 0: it has no rank and waits for one."""
        return 0 if self.rejoins else self.newest


def assigned(state: TaskRanks, generation: int, planned: bool) -> TaskRanks:
    """The coordinator assigned a rank in this generation. Raises if a message of a newer one is known."""
    if generation < state.known:
        raise MembershipChanged(f"generation {generation} is over: this device is at {state.known}")
    if generation == state.newest:
        return state  # the message was sent twice
    return replace(
        state, newest=generation, known=generation, planned=planned, move=False, rejoins=False, released=False
    )


def stopped(state: TaskRanks, generation: int) -> TaskRanks:
    """The coordinator stopped this generation and all older ones."""
    return replace(state, stopped=max(state.stopped, generation))


def outdated(state: TaskRanks) -> bool:
    """Whether the links of the taken generation are useless: operations on them must fail at once."""
    superseded = state.pending and not state.planned
    return state.taken > 0 and (superseded or state.stopped >= state.taken or state.dismissed)


def moving(state: TaskRanks, generation: int) -> TaskRanks:
    """All members have their planned ranks of this generation. A task without one ignores this: the move is over."""
    if generation != state.known:
        return state
    return replace(state, move=state.planned and (state.pending or state.released))


def took(state: TaskRanks, generation: int) -> TaskRanks:
    """The task takes the assignment of this generation."""
    newest, taken = max(state.newest, generation), max(state.taken, generation)
    known = max(state.known, generation)
    planned = state.planned and newest > taken  # a newer assignment came meanwhile
    left_out = state.left_out and state.rejoins  # it was left out of this generation, too
    return replace(state, newest=newest, known=known, taken=taken, move=False, planned=planned, left_out=left_out)


def gave_up(state: TaskRanks, generation: int) -> TaskRanks:
    """The task cannot open the links of this generation: the next one must learn, too, that it was left out."""
    return replace(took(state, generation), left_out=state.left_out)


def invited(state: TaskRanks, generation: int) -> TaskRanks:
    """The coordinator asks it to take part in a job whose newest generation is this."""
    return replace(state, known=max(state.known, generation))


def rejoined(state: TaskRanks, generation: int) -> TaskRanks:
    """Other devices continued without it, up to this generation, and the coordinator asks it to take part again."""
    return replace(
        invited(state, generation),
        taken=state.newest,
        rejoins=True,
        left_out=True,
        move=False,
        planned=False,
        released=False,
        dismissed=False,
    )


def released(state: TaskRanks, generation: int, final: bool) -> TaskRanks:
    """It has no rank in this generation. ``final``: no other device needs its state."""
    if generation < state.known:
        return state
    return replace(state, known=generation, released=True, planned=True, dismissed=state.dismissed or final)


def next_step(state: TaskRanks) -> NextStep:
    """The next action of a task that has left its generation."""
    if state.dismissed:
        return NextStep.LEAVE
    if state.released:
        return NextStep.HAND_OVER
    return NextStep.TAKE if state.pending else NextStep.WAIT
