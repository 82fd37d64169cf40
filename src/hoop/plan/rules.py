"""Rules: a rank that decides by itself what to do next, from what has arrived and from nothing else.

Where an order cannot be written down beforehand (asynchronous strategies, RingTMP), a strategy gives each rank a rule
instead of a list. Whoever runs it, the engine on real links or the simulator on a clock, goes round this loop:

    while not rule.finished:
        for message in whatever has come in:     # in the order in which each peer sent it
            rule.arrived(message)                # as this rank calls it: 2<0@1, 2(0@3, 0T@1, 0G@4
        instruction = rule.next()
        if instruction is None:
            wait for a message
        else:
            execute(instruction)                 # a receive has arrived by then: it takes the message and never waits

So what ``next`` returned, one after the other, is a list like any in a plan, receives included, in an order that was
legal this time. A rule has no clock and no randomness: the same arrivals give the same instructions.

A rule spans several steps. Their micro-batches are numbered on: micro-batch m of step k is ``k * plan.micros + m``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from hoop.plan.instructions import RECEIVES, Instruction


class Rule(Protocol):
    """What one rank does, decided as messages arrive."""

    @property
    def finished(self) -> bool:
        """Whether everything has been handed out; ``next`` returns None from then on."""

    def arrived(self, message: Instruction) -> None:
        """Takes note of a message, written as the receive it is for this rank."""

    def next(self) -> Instruction | None:
        """What to do now; None to wait for a message."""

    def version(self, micro: int) -> int | None:
        """How many updates the weights have had that this micro-batch is computed with, forward and backward.

        Counted from the rule's beginning; None means the newest weights this rank has.
        """


def in_turn(peers: Sequence[int], served: int) -> int:
    """Whose message comes next, after that of ``served``: nobody is kept waiting by others who send all the time."""
    return min(peers, key=lambda peer: (peer <= served, peer))


class ListRule:
    """A list as a rule: in order, each receive once it has arrived."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._instructions = instructions
        self._position = 0
        self._arrived: Counter[Instruction] = Counter()

    @property
    def finished(self) -> bool:
        return self._position == len(self._instructions)

    def arrived(self, message: Instruction) -> None:
        self._arrived[message] += 1

    def next(self) -> Instruction | None:
        if self._position == len(self._instructions):
            return None
        instruction = self._instructions[self._position]
        if instruction[0] in RECEIVES:
            if not self._arrived[instruction]:
                return None
            self._arrived[instruction] -= 1
        self._position += 1
        return instruction

    def version(self, micro: int) -> int | None:
        return None
