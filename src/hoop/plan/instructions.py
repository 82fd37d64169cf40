"""The instructions of a training step, their text form, and their categories.

A micro-batch is a shard of the global batch. Its gradient has a fixed place in the sum, independent of the rank that
computes it and of the order of computation. A stage is a contiguous run of the model's blocks.

    0L0      load micro-batch 0 (only ranks that hold the first stage)
    2F0      forward of micro-batch 0 through stage 2
    2B0      backward: the gradients of the stage's input and of its weights
    2I0 2W0  the two halves of 2B0, for schedules that run them at different times: input gradient, weight gradient
    2>0@3    send stage 2's output for micro-batch 0 to rank 3, which holds stage 3
    2<0@1    receive stage 2's input from rank 1
    2)0@1    send the gradient of stage 2's input to rank 1
    2(0@3    receive the gradient of stage 2's output from rank 3
    2A       all-reduce stage 2's gradients over all shards and all replicas
    2U       update stage 2's weights
    0C       collect the slices of the weights that other ranks have updated: an all-gather before a step

``0C`` is in no plan: the ranks of a sharded update (``engine/roles/sharded_data.py``) gather the weights when they are
needed next, which may be for an evaluation or a checkpoint.

With a parameter server the leading number is a slice of the weights, and each worker holds the whole model as stage 0:

    2P@4     worker: push slice 2's gradients to the server at rank 4
    2T@1     server: take slice 2's gradients from the worker at rank 1
    2V@1     server: give slice 2's weights to the worker at rank 1
    2G@4     worker: get slice 2's weights from the server at rank 4 (the worker sends no request)

The engine and the simulator use the same categories for time accounts, traces and charts.
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from hoop.errors import InvalidArgument


class InstructionKind(StrEnum):
    """The operation of an instruction; the value is its letter in the text form."""

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
    GATHER = "C"

    __hash__ = str.__hash__  # kinds are dict keys in hot loops, and Enum.__hash__ is a Python function


SENDS = {
    InstructionKind.SEND_OUTPUT: InstructionKind.RECV_INPUT,
    InstructionKind.SEND_GRADIENT: InstructionKind.RECV_GRADIENT,
    InstructionKind.PUSH: InstructionKind.TAKE,
    InstructionKind.GIVE: InstructionKind.GET,
}
"""Kind of the receive that matches each kind of send."""
RECEIVES = {receive: send for send, receive in SENDS.items()}
"""Kind of the send that matches each kind of receive."""
_COUNTERPARTS = SENDS | RECEIVES
WITH_PEER = frozenset(_COUNTERPARTS)
"""Kinds with a peer rank."""
PER_MICRO = frozenset(InstructionKind) - {
    InstructionKind.REDUCE,
    InstructionKind.UPDATE,
    InstructionKind.PUSH,
    InstructionKind.GET,
    InstructionKind.TAKE,
    InstructionKind.GIVE,
    InstructionKind.GATHER,
}
"""Kinds with a micro-batch."""
BACKWARD_KINDS = frozenset({InstructionKind.BACKWARD, InstructionKind.BACKWARD_INPUT})
"""Kinds that produce the gradient of a stage's input."""
GRADIENT_KINDS = frozenset({InstructionKind.BACKWARD, InstructionKind.BACKWARD_WEIGHT})
"""Kinds that produce the gradient of a stage's weights; the stage's activations can be freed afterwards."""
_STAGE_OFFSET = {
    InstructionKind.SEND_OUTPUT: 1,
    InstructionKind.RECV_INPUT: -1,
    InstructionKind.SEND_GRADIENT: -1,
    InstructionKind.RECV_GRADIENT: 1,
}
"""Stage at the peer's end of a message, relative to the stage at this end."""

_LETTERS = {kind.value: kind for kind in InstructionKind}
_TEXT = re.compile(r"(\d+)([A-Z<>()])(\d*)(?:@(\d+))?")


class Instruction(NamedTuple):
    """One instruction of a rank; ``micro`` and ``peer`` are -1 for kinds that have none."""

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
            raise InvalidArgument(f"instruction: {text[:40]!r} is not an instruction; examples: 2F0, 2>0@3, 2A, 2U")
        kind = _LETTERS[match[2]]
        if (kind in PER_MICRO) != bool(match[3]):
            raise InvalidArgument(f"instruction: {text!r} {'lacks' if kind in PER_MICRO else 'has'} a micro-batch")
        if (kind in WITH_PEER) != (match[4] is not None):
            raise InvalidArgument(f"instruction: {text!r} {'lacks' if kind in WITH_PEER else 'has'} a peer")
        return cls(kind, int(match[1]), int(match[3] or -1), int(match[4] or -1))

    def counterpart(self, rank: int) -> Instruction:
        """The peer's instruction for the same message; ``rank`` is the rank that executes this one.

        The output of stage 2 is the input of stage 3: the counterpart of ``2>0@3`` at rank 1 is ``3<0@1`` at rank 3.
        """
        kind, stage, micro, _ = self
        return Instruction(_COUNTERPARTS[kind], stage + _STAGE_OFFSET.get(kind, 0), micro, rank)


COMPUTE, COMMUNICATE, IDLE = "compute", "communicate", "idle"
OTHER = "other"
"""Category of traced work that is no instruction: evaluations, snapshots, and the training loop between two steps."""
CATEGORY = {
    InstructionKind.LOAD: "load",
    InstructionKind.FORWARD: "forward",
    InstructionKind.BACKWARD: "backward",
    InstructionKind.BACKWARD_INPUT: "backward",
    InstructionKind.BACKWARD_WEIGHT: "backward",
    InstructionKind.UPDATE: "update",
    InstructionKind.REDUCE: "reduce",
    InstructionKind.GATHER: "gather",
    InstructionKind.SEND_OUTPUT: "send",
    InstructionKind.SEND_GRADIENT: "send",
    InstructionKind.PUSH: "push",
    InstructionKind.GIVE: "send",
    InstructionKind.RECV_INPUT: "wait",
    InstructionKind.RECV_GRADIENT: "wait",
    InstructionKind.GET: "wait",
    InstructionKind.TAKE: "wait",
}
"""Category of each kind. A receive counts as ``wait`` until the message arrives; copying it counts as ``recv``."""
SHARE = {
    "load": COMPUTE,
    "forward": COMPUTE,
    "backward": COMPUTE,
    "update": COMPUTE,
    "reduce": COMMUNICATE,
    "gather": COMMUNICATE,
    "send": COMMUNICATE,
    "push": COMMUNICATE,
    "recv": COMMUNICATE,
    "wait": IDLE,
}
"""Share of a device's time (compute, communicate or idle) that each category counts towards."""
