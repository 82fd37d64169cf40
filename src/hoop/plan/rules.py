"""Rules: message-driven schedules, in which a rank chooses its next instruction from the messages it has received.

A strategy gives each rank a rule where no fixed order exists (asynchronous strategies, RingTMP). The engine runs a rule
on real links, the simulator on a virtual clock; both run this loop:

    while not rule.finished:
        for message in received_messages():      # in the order in which each peer sent them
            rule.on_message(message)             # as this rank's receive instruction: 2<0@1, 2(0@3, 0T@1, 0G@4
        instruction = rule.next()
        if instruction is None:
            wait_for_a_message()
        else:
            execute(instruction)                 # a receive never waits: its message has arrived by then

The instructions that ``next`` returns form a list like those in a plan, receives included. A rule has no clock and no
randomness: the same messages in the same order give the same instructions.

A rule spans several steps. Micro-batch numbers continue across steps: micro-batch m of step k is number
``k * plan.num_microbatches + m``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from hoop.plan.instructions import RECEIVES, Instruction


class Rule(Protocol):
    """Chooses one rank's instructions as messages arrive."""

    @property
    def finished(self) -> bool:
        """True once ``next`` has returned every instruction; it returns None from then on."""

    def on_message(self, message: Instruction) -> None:
        """Records a received message, given as this rank's receive instruction."""

    def next(self) -> Instruction | None:
        """The instruction to execute now; None: wait for a message."""

    def weight_version(self, micro: int) -> int | None:
        """Version of the weights for this micro-batch, forward and backward: the number of updates they have had.

        Updates count from the start of the rule. None means the newest weights on this rank.
        """


def round_robin(peers: Sequence[int], last_served: int) -> int:
    """The peer to serve after ``last_served``; round robin, so that peers that send all the time starve no other."""
    return min(peers, key=lambda peer: (peer <= last_served, peer))


class ListRule:
    """A fixed list of instructions as a rule: in order, each receive once its message has arrived."""

    def __init__(self, instructions: Sequence[Instruction]) -> None:
        self._instructions = instructions
        self._position = 0
        self._arrived: Counter[Instruction] = Counter()

    @property
    def finished(self) -> bool:
        return self._position == len(self._instructions)

    def on_message(self, message: Instruction) -> None:
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

    def weight_version(self, micro: int) -> int | None:
        return None
