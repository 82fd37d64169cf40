"""Builds a whole plan from each rank's order of forwards and backwards.

A schedule gives only that order. The builder inserts loads, messages, reductions and updates; messages follow from
which rank computes the next stage of the same micro-batch:

- A load comes just before the forward that needs it.
- A send comes just after the computation of its tensor.
- A receive comes just before the computation that needs it, but never before earlier messages from the same peer:
  those are received first. Receiving them early costs nothing, since the peer sent them earlier.
- At the end a rank reduces all its stages in order, then updates them. All reductions precede all updates because
  gradient clipping needs the whole gradient. The order is the same on every rank because a reduction is collective.

So a built plan can deadlock only if the ranks' orders of computation contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hoop.plan.instructions import BACKWARD_KINDS, Instruction, InstructionKind
from hoop.plan.plan import Plan

FORWARD, LOAD = (
    InstructionKind.FORWARD,
    InstructionKind.LOAD,
)  # module globals: looking up an enum member each time is slow, and plans may be large
SEND_OUTPUT, SEND_GRADIENT = InstructionKind.SEND_OUTPUT, InstructionKind.SEND_GRADIENT
RECV_INPUT, RECV_GRADIENT = InstructionKind.RECV_INPUT, InstructionKind.RECV_GRADIENT

Computes = Sequence[Sequence[Instruction]]
"""The forwards and backwards of each rank, in order."""
Owner = dict[tuple[int, int], int]
"""The rank that computes each (stage, micro-batch)."""


def build_plan(num_microbatches: int, holders: Sequence[Sequence[int]], computes: Computes) -> Plan:
    """The plan in which every rank computes in the order that ``computes`` gives."""
    owner: Owner = {}
    for rank, line in enumerate(computes):
        for kind, stage, micro, _ in line:
            if kind is FORWARD:
                owner[stage, micro] = rank
    unreceived: dict[tuple[int, int], Iterator[Instruction]] = {}
    outgoing = []
    for rank, line in enumerate(computes):
        sends = [_send_after(one, rank, owner) for one in line]
        outgoing.append(sends)
        messages: dict[int, list[Instruction]] = {}
        for send in sends:
            if send is not None:
                messages.setdefault(send.peer, []).append(send.counterpart(rank))
        unreceived |= {(rank, peer): iter(found) for peer, found in messages.items()}
    held: list[list[int]] = [[] for _ in computes]
    for stage, ranks in enumerate(holders):
        for rank in ranks:
            held[rank].append(stage)
    lines = []
    for rank, line in enumerate(computes):
        instructions: list[Instruction] = []
        received: set[Instruction] = set()
        for one, send in zip(line, outgoing[rank], strict=True):
            needed = _receive_before(one, rank, owner)
            if needed is not None:
                while needed not in received:
                    message = next(unreceived[needed.peer, rank])
                    received.add(message)
                    instructions.append(message)
                received.remove(needed)
            elif one.kind is FORWARD and one.stage == 0:
                instructions.append(Instruction(LOAD, 0, one.micro))
            instructions.append(one)
            if send is not None:
                instructions.append(send)
        lines.append((*instructions, *finish_step(held[rank])))
    return Plan(num_microbatches, tuple(map(tuple, holders)), tuple(lines))


def finish_step(stages: Sequence[int]) -> tuple[Instruction, ...]:
    """The reductions and updates that end a step on a rank that holds these stages."""
    kinds = (InstructionKind.REDUCE, InstructionKind.UPDATE)
    return tuple(Instruction(kind, stage) for kind in kinds for stage in stages)


def _send_after(one: Instruction, rank: int, owner: Owner) -> Instruction | None:
    """The send that follows ``one``; None if its result is used on this rank."""
    kind, stage, micro, _ = one
    if kind is FORWARD:
        consumer = owner.get((stage + 1, micro), rank)
        return None if consumer == rank else Instruction(SEND_OUTPUT, stage, micro, consumer)
    if kind in BACKWARD_KINDS:
        consumer = owner.get((stage - 1, micro), rank)
        return None if consumer == rank else Instruction(SEND_GRADIENT, stage, micro, consumer)
    return None


def _receive_before(one: Instruction, rank: int, owner: Owner) -> Instruction | None:
    """The receive that ``one`` needs; None if its input was computed on this rank."""
    kind, stage, micro, _ = one
    if kind is FORWARD:
        producer = owner.get((stage - 1, micro), rank)
        return None if producer == rank else Instruction(RECV_INPUT, stage, micro, producer)
    if kind in BACKWARD_KINDS:
        producer = owner.get((stage + 1, micro), rank)
        return None if producer == rank else Instruction(RECV_GRADIENT, stage, micro, producer)
    return None
