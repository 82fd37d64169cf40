"""The instructions of a training step, and how they are written.

A micro-batch is a shard of the global batch: whoever computes it, and in whatever order, its gradient has a fixed place
in the sum. A stage is a contiguous run of the model's blocks.

    2F0      stage 2 computes micro-batch 0 forward            (0L0: load it first, for whoever holds the first stage)
    2B0      … backward: the gradient of its input and of its weights
    2I0 2W0  … the two halves of 2B0, where a schedule puts them at different times
    2>0@3    send what stage 2 made of micro-batch 0 to rank 3, which holds stage 3
    2<0@1    receive from rank 1 what stage 2 is to work on
    2)0@1    send the gradient of stage 2's input to rank 1
    2(0@3    receive from rank 3 the gradient of stage 2's output
    2A       add up stage 2's gradients over all shards and all replicas
    2U       update stage 2's weights

With a parameter server the number in front is a slice of the weights, and the workers hold the whole model as stage 0:

    2P@4     push slice 2's gradients to the server at rank 4
    2T@1     … which takes them from the worker at rank 1
    2V@1     the server gives slice 2's weights to the worker at rank 1
    2G@4     … which gets them from the server at rank 4; nothing is sent to ask for them

What an instruction counts as, in accounts of time, traces and pictures: the engine's and the simulator's alike.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from hoop.errors import InvalidArgument


class InstructionKind(StrEnum):
    """What an instruction does; the value is its letter."""

    LOAD = "L"
    FORWARD = "F"
    BACKWARD = "B"
    BACKWARD_INPUT = "I"
    BACKWARD_WEIGHT = "W"
    SEND_OUTPUT = ">"
    RECV_INPUT = "<"
    SEND_GRADIENT = ")"
    RECV_GRADIENT = "("
    REDUCE = "A"
    UPDATE = "U"
    PUSH = "P"
    GET = "G"
    TAKE = "T"
    GIVE = "V"

    __hash__ = str.__hash__  # kinds are looked up all the time, and an enum's own hash is a Python function


SENDS = {
    InstructionKind.SEND_OUTPUT: InstructionKind.RECV_INPUT,
    InstructionKind.SEND_GRADIENT: InstructionKind.RECV_GRADIENT,
    InstructionKind.PUSH: InstructionKind.TAKE,
    InstructionKind.GIVE: InstructionKind.GET,
}
"""Each message's sending side, and what the receiver calls it."""
RECEIVES = {receive: send for send, receive in SENDS.items()}
"""Each message's receiving side, and what the sender calls it."""
_MIRRORS = SENDS | RECEIVES
WITH_PEER = frozenset(_MIRRORS)
"""Kinds that concern another rank."""
PER_MICRO = frozenset(InstructionKind) - {
    InstructionKind.REDUCE,
    InstructionKind.UPDATE,
    InstructionKind.PUSH,
    InstructionKind.GET,
    InstructionKind.TAKE,
    InstructionKind.GIVE,
}
"""Kinds that concern one micro-batch."""
BACKWARD_KINDS = frozenset({InstructionKind.BACKWARD, InstructionKind.BACKWARD_INPUT})
"""Kinds after which the gradient of a stage's input is there."""
GRADIENT_KINDS = frozenset({InstructionKind.BACKWARD, InstructionKind.BACKWARD_WEIGHT})
"""Kinds after which the gradient of a stage's weights is there, and its activations are not needed any more."""
_ACROSS = {
    InstructionKind.SEND_OUTPUT: 1,
    InstructionKind.RECV_INPUT: -1,
    InstructionKind.SEND_GRADIENT: -1,
    InstructionKind.RECV_GRADIENT: 1,
}
"""How much further the stage is at the other end of a message."""

_LETTERS = {kind.value: kind for kind in InstructionKind}
_TEXT = re.compile(r"(\d+)([A-Z<>()])(\d*)(?:@(\d+))?")


class Instruction(NamedTuple):
    """One thing a rank does."""

    kind: InstructionKind
    stage: int
    micro: int = -1
    peer: int = -1

    def __str__(self) -> str:
        micro = self.micro if self.micro >= 0 else ""
        peer = f"@{self.peer}" if self.peer >= 0 else ""
        return f"{self.stage}{self.kind.value}{micro}{peer}"

    @classmethod
    def parse(cls, text: str) -> Instruction:
        """The inverse of ``str``."""
        match = _TEXT.fullmatch(text)
        if match is None or match[2] not in _LETTERS:
            raise InvalidArgument(f"instruction: {text[:40]!r} is none; they look like 2F0, 2>0@3, 2A, 2U")
        kind = _LETTERS[match[2]]
        if (kind in PER_MICRO) != bool(match[3]):
            raise InvalidArgument(
                f"instruction: {text!r} {'lacks' if kind in PER_MICRO else 'has'} a micro-batch"
            )
        if (kind in WITH_PEER) != (match[4] is not None):
            raise InvalidArgument(f"instruction: {text!r} {'lacks' if kind in WITH_PEER else 'has'} a peer")
        return cls(kind, int(match[1]), int(match[3] or -1), int(match[4] or -1))

    def mirrored(self, rank: int) -> Instruction:
        """The same message as its other end calls it, where ``rank`` is who has this instruction.

        What leaves stage 2 as an output arrives as the input of stage 3: ``2>0@3`` at rank 1 is ``3<0@1`` at rank 3.
        """
        kind, stage, micro, _ = self
        return Instruction(_MIRRORS[kind], stage + _ACROSS.get(kind, 0), micro, rank)


COMPUTE, COMMUNICATE, IDLE = "compute", "communicate", "idle"
CATEGORY = {
    InstructionKind.LOAD: "load",
    InstructionKind.FORWARD: "forward",
    InstructionKind.BACKWARD: "backward",
    InstructionKind.BACKWARD_INPUT: "backward",
    InstructionKind.BACKWARD_WEIGHT: "backward",
    InstructionKind.UPDATE: "update",
    InstructionKind.REDUCE: "reduce",
    InstructionKind.SEND_OUTPUT: "send",
    InstructionKind.SEND_GRADIENT: "send",
    InstructionKind.PUSH: "push",
    InstructionKind.GIVE: "send",
    InstructionKind.RECV_INPUT: "wait",
    InstructionKind.RECV_GRADIENT: "wait",
    InstructionKind.GET: "wait",
    InstructionKind.TAKE: "wait",
}
"""Each kind's category; a receive is waiting, and what is copied once it has come is ``recv``."""
SHARE = {
    "load": COMPUTE,
    "forward": COMPUTE,
    "backward": COMPUTE,
    "update": COMPUTE,
    "reduce": COMMUNICATE,
    "send": COMMUNICATE,
    "push": COMMUNICATE,
    "recv": COMMUNICATE,
    "wait": IDLE,
}
"""Which share of a device's time each category belongs to."""
