"""How far one rank has come in a step, and whether what it does next makes sense there.

Whether a plan can be executed, seen without executing it.

``check`` returns sentences, each with the rank and the instruction it is about. A plan without any is one in which

- every instruction names stages, ranks and micro-batches that are there, and a rank computes only what it holds;
- every forward comes after its input, every backward after its forward and after its gradient;
- every micro-batch goes forward and backward through every stage exactly once, over all replicas;
- a stage is updated after its gradients are added up, which comes after all its backwards;
- every message that is sent is received, in the order in which it was sent;
- nobody waits for ever, if sends do not wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TypeVar

from hoop.plan.instructions import (
    BACKWARD_KINDS,
    GRADIENT_KINDS,
    PER_MICRO,
    RECEIVES,
    SENDS,
    WITH_PEER,
    Instruction,
    InstructionKind,
)
from hoop.plan.plan import Plan
from hoop.plan.unit_clock import timeline

T = TypeVar("T")
Place = tuple[int, int]
"""A stage and a micro-batch."""


class StepProgress:
    """What a rank has at hand: inputs, outputs and gradients by stage and micro-batch."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._last = plan.stages - 1
        self._serves = rank in plan.servers
        self._slices = set(range(len(plan.servers)))
        self._due = {
            stage: sum(one.kind in GRADIENT_KINDS and one.stage == stage for one in plan.ranks[rank])
            for stage in plan.held_by(rank)
        }
        self._computes = any(self._due.values())
        self._holds = set(plan.held_by(rank)) if not plan.servers else set()
        self._inputs: set[Place] = set()
        self._gradients: set[Place] = set()
        self._forwards: set[Place] = set()
        self._backwards: set[Place] = set()
        self._halves: set[Place] = set()
        self._done: dict[int, int] = dict.fromkeys(self._due, 0)
        self._got: set[int] = set()
        self._pushed: set[int] = set()
        self._reduced: set[int] = set()
        self._taken: set[int] = set()
        self._updated: set[int] = set()

    def step(self, one: Instruction) -> Iterator[str]:
        """Takes the next instruction; what is wrong with it here, if anything."""
        place = one.stage, one.micro
        match one.kind:
            case InstructionKind.LOAD | InstructionKind.RECV_INPUT:
                if (one.kind is InstructionKind.LOAD) != (one.stage == 0):
                    yield "is not how that stage gets its input: stage 0 loads, the others receive"
                yield from self._new(self._inputs, place, "that input is already there")
            case InstructionKind.RECV_GRADIENT:
                if one.stage == self._last:
                    yield "is of the last stage, whose gradient nobody sends"
                yield from self._new(self._gradients, place, "that gradient is already there")
            case InstructionKind.FORWARD:
                if place not in self._inputs:
                    yield "comes before its input"
                if self._got != self._slices:
                    yield f"comes before the weights of slices {sorted(self._slices - self._got)}"
                yield from self._new(self._forwards, place, "was computed before")
                self._inputs.add((one.stage + 1, one.micro))
            case InstructionKind.SEND_OUTPUT:
                if place not in self._forwards:
                    yield "comes before the forward that makes it"
            case InstructionKind.BACKWARD | InstructionKind.BACKWARD_INPUT:
                if place not in self._forwards:
                    yield "comes before its forward"
                if one.stage != self._last and place not in self._gradients:
                    yield "comes before its gradient"
                yield from self._new(self._backwards, place, "was computed before")
                self._gradients.add((one.stage - 1, one.micro))
                if one.kind is InstructionKind.BACKWARD_INPUT:
                    self._halves.add(place)
                else:
                    self._done[one.stage] += 1
            case InstructionKind.BACKWARD_WEIGHT:
                if place not in self._halves:
                    yield "comes before its other half, or twice"
                self._halves.discard(place)
                self._done[one.stage] += 1
            case InstructionKind.SEND_GRADIENT:
                if place not in self._backwards:
                    yield "comes before the backward that makes it"
            case _:
                yield from self._weights(one)

    def end(self) -> Iterator[str]:
        """What is missing at the end of the list."""
        for stage, micro in sorted(self._halves):
            yield f"{Instruction(InstructionKind.BACKWARD_WEIGHT, stage, micro)} is missing"
        for stage in sorted(self._holds - self._updated):
            yield f"{Instruction(InstructionKind.UPDATE, stage)} is missing"
        for number in sorted(self._taken):
            yield f"{Instruction(InstructionKind.UPDATE, number)} is missing after the last gradients that were taken"
        if self._computes and self._pushed != self._slices:
            yield f"the gradients of slices {sorted(self._slices - self._pushed)} are never pushed"

    def _weights(self, one: Instruction) -> Iterator[str]:
        """Instructions about a whole stage, or a slice of the weights."""
        match one.kind:
            case InstructionKind.GET:
                self._got.add(one.stage)
            case InstructionKind.PUSH:
                yield from self._finished(0)
                yield from self._new(self._pushed, one.stage, "was pushed before")
            case InstructionKind.TAKE:
                if one.stage in self._reduced:
                    yield "comes after the gradients are added up"
                self._taken.add(one.stage)
            case InstructionKind.REDUCE:
                if self._serves:
                    if one.stage not in self._taken:
                        yield "adds up nothing: no gradients were taken"
                else:
                    yield from self._finished(one.stage)
                yield from self._new(self._reduced, one.stage, "was added up before")
            case InstructionKind.UPDATE if self._serves:
                if one.stage not in self._taken:
                    yield "comes before any gradient was taken"
                self._taken.discard(one.stage)
            case InstructionKind.UPDATE:
                if one.stage not in self._reduced:
                    yield "comes before its gradients are added up"
                yield from self._new(self._updated, one.stage, "was updated before")

    def _finished(self, stage: int) -> Iterator[str]:
        missing = self._due.get(stage, 0) - self._done.get(stage, 0)
        if missing:
            yield f"comes before {missing} of its {self._due[stage]} backwards"

    @staticmethod
    def _new(seen: set[T], what: T, complaint: str) -> Iterator[str]:
        if what in seen:
            yield complaint
        seen.add(what)


_SLICED = frozenset({InstructionKind.PUSH, InstructionKind.GET, InstructionKind.TAKE, InstructionKind.GIVE})
_SERVED = frozenset(
    {InstructionKind.TAKE, InstructionKind.GIVE, InstructionKind.REDUCE, InstructionKind.UPDATE}
)


def check(plan: Plan) -> list[str]:
    """What is wrong with a plan, as sentences; empty where it is fine."""
    wrong = [*_shape(plan)]
    if wrong:
        return wrong
    for rank, instructions in enumerate(plan.ranks):
        progress = StepProgress(plan, rank)
        for one in instructions:
            wrong += [f"rank {rank}: {one} {complaint}" for complaint in progress.step(one)]
        wrong += [f"rank {rank}: {complaint}" for complaint in progress.end()]
    return [*wrong, *_coverage(plan), *_messages(plan), *_waits(plan)]


def _shape(plan: Plan) -> Iterator[str]:
    """Numbers that are not there; later checks take for granted that they are."""
    for what, groups in (("stage", plan.holders), ("slice", [(rank,) for rank in plan.servers])):
        for number, ranks in enumerate(groups):
            if not ranks or not set(ranks) <= set(range(plan.size)) or len(set(ranks)) < len(ranks):
                yield f"{what} {number} is held by ranks {list(ranks)}, of {plan.size} ranks"
    held = [set(plan.held_by(rank)) for rank in range(plan.size)]
    for rank, one in plan:
        kept = [number for number, server in enumerate(plan.servers) if server == rank]
        if one.kind in _SLICED or kept:
            mine = (
                range(len(plan.servers)) if one.kind in {InstructionKind.PUSH, InstructionKind.GET} else kept
            )
            if kept and one.kind not in _SERVED:
                yield f"rank {rank}: {one} is nothing that a server does"
            elif one.stage not in mine:
                yield f"rank {rank}: {one} is of slice {one.stage}, not one of {list(mine)}"
        elif one.stage not in held[rank]:
            yield f"rank {rank}: {one} is of a stage that it does not hold; it holds {sorted(held[rank])}"
        if one.kind in PER_MICRO and not 0 <= one.micro < plan.micros:
            yield f"rank {rank}: {one} is of a micro-batch that is not there; there are {plan.micros}"
        if one.kind in WITH_PEER and (not 0 <= one.peer < plan.size or one.peer == rank):
            yield f"rank {rank}: {one} has no such peer; there are {plan.size} ranks"


def _coverage(plan: Plan) -> Iterator[str]:
    """Each stage of each micro-batch, once forward and once backward."""
    computed = Counter(
        (one.kind in BACKWARD_KINDS, one.stage, one.micro)
        for _, one in plan
        if one.kind in BACKWARD_KINDS or one.kind is InstructionKind.FORWARD
    )
    for stage in range(plan.stages):
        for micro in range(plan.micros):
            for backward in (False, True):
                times = computed[backward, stage, micro]
                if times != 1:
                    name = Instruction(
                        InstructionKind.BACKWARD if backward else InstructionKind.FORWARD, stage, micro
                    )
                    yield f"{name} happens {times} times over all ranks, not once"


def _messages(plan: Plan) -> Iterator[str]:
    """Sends and receives of each pair of ranks, side by side."""
    sent: dict[tuple[int, int], list[Instruction]] = {}
    received: dict[tuple[int, int], list[Instruction]] = {}
    for rank, one in plan:
        if one.kind in SENDS:
            sent.setdefault((rank, one.peer), []).append(one.mirrored(rank))
        elif one.kind in RECEIVES:
            received.setdefault((one.peer, rank), []).append(one)
    for pair in sorted(sent.keys() | received.keys()):
        source, target = pair
        out, back = sent.get(pair, []), received.get(pair, [])
        for place, (message, expected) in enumerate(zip(out, back, strict=False)):
            if message != expected:
                yield (
                    f"rank {target}: {expected} is message {place} from rank {source}, "
                    f"which sends {message.mirrored(target)} there: order or kind differ"
                )
                break
        else:
            for message in out[len(back) :]:
                yield f"rank {source}: {message.mirrored(target)} is never received"
            for expected in back[len(out) :]:
                yield f"rank {target}: {expected} is never sent"


def _waits(plan: Plan) -> Iterator[str]:
    for rank, one in timeline(plan).stuck:
        yield f"rank {rank}: waits for ever at {one}"
