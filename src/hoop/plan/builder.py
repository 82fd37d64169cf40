"""From what each rank computes to a whole plan: loads, messages, reductions and updates put in between.

A schedule only says in which order a rank computes. What must be sent follows from who computes the next stage of the
same micro-batch:

- a load comes just before the forward that needs it;
- a send comes just after what made it;
- a receive comes as late as it can, just before what needs it, but never overtakes an earlier message of the same peer:
  those are received first. Waiting for them costs nothing, since the peer sent them earlier;
- when a rank has computed everything, it reduces its stages in order, then updates them. Reductions come first because
  what is done to the whole gradient (clipping) needs all of it, and in the same order everywhere because they are
  meetings.

So a plan that is woven can only deadlock if the orders of computing contradict each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hoop.plan.instructions import BACKWARD_KINDS, Instruction, InstructionKind
from hoop.plan.plan import Plan

FORWARD, LOAD = (
    InstructionKind.FORWARD,
    InstructionKind.LOAD,
)  # an enum's member costs a lookup each time, and plans may be large
SEND_OUTPUT, SEND_GRADIENT = InstructionKind.SEND_OUTPUT, InstructionKind.SEND_GRADIENT
RECV_INPUT, RECV_GRADIENT = InstructionKind.RECV_INPUT, InstructionKind.RECV_GRADIENT

Computes = Sequence[Sequence[Instruction]]
"""For each rank its forwards and backwards, in order."""
Owner = dict[tuple[int, int], int]
"""Who computes a stage of a micro-batch."""


def build_plan(micros: int, holders: Sequence[Sequence[int]], computes: Computes) -> Plan:
    """The plan in which every rank computes in the given order."""
    owner: Owner = {}
    for rank, line in enumerate(computes):
        for kind, stage, micro, _ in line:
            if kind is FORWARD:
                owner[stage, micro] = rank
    posted: dict[tuple[int, int], Iterator[Instruction]] = {}
    outgoing = []
    for rank, line in enumerate(computes):
        sends = [_send(one, rank, owner) for one in line]
        outgoing.append(sends)
        messages: dict[int, list[Instruction]] = {}
        for send in sends:
            if send is not None:
                messages.setdefault(send.peer, []).append(send.mirrored(rank))
        posted |= {(rank, peer): iter(found) for peer, found in messages.items()}
    held: list[list[int]] = [[] for _ in computes]
    for stage, ranks in enumerate(holders):
        for rank in ranks:
            held[rank].append(stage)
    lines = []
    for rank, line in enumerate(computes):
        woven: list[Instruction] = []
        received: set[Instruction] = set()
        for one, send in zip(line, outgoing[rank], strict=True):
            need = _needs(one, rank, owner)
            if need is not None:
                while need not in received:
                    message = next(posted[need.peer, rank])
                    received.add(message)
                    woven.append(message)
                received.remove(need)
            elif one.kind is FORWARD and one.stage == 0:
                woven.append(Instruction(LOAD, 0, one.micro))
            woven.append(one)
            if send is not None:
                woven.append(send)
        lines.append((*woven, *finish_step(held[rank])))
    return Plan(micros, tuple(map(tuple, holders)), tuple(lines))


def finish_step(stages: Sequence[int]) -> tuple[Instruction, ...]:
    """How a step ends for a rank that holds these stages."""
    kinds = (InstructionKind.REDUCE, InstructionKind.UPDATE)
    return tuple(Instruction(kind, stage) for kind in kinds for stage in stages)


def _send(one: Instruction, rank: int, owner: Owner) -> Instruction | None:
    """What must be sent after computing, if its user is elsewhere."""
    kind, stage, micro, _ = one
    if kind is FORWARD:
        user = owner.get((stage + 1, micro), rank)
        return None if user == rank else Instruction(SEND_OUTPUT, stage, micro, user)
    if kind in BACKWARD_KINDS:
        user = owner.get((stage - 1, micro), rank)
        return None if user == rank else Instruction(SEND_GRADIENT, stage, micro, user)
    return None


def _needs(one: Instruction, rank: int, owner: Owner) -> Instruction | None:
    """What must have been received before computing, if it was made elsewhere."""
    kind, stage, micro, _ = one
    if kind is FORWARD:
        maker = owner.get((stage - 1, micro), rank)
        return None if maker == rank else Instruction(RECV_INPUT, stage, micro, maker)
    if kind in BACKWARD_KINDS:
        maker = owner.get((stage + 1, micro), rank)
        return None if maker == rank else Instruction(RECV_GRADIENT, stage, micro, maker)
    return None
