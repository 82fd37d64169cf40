"""Validates a plan without executing it.

``check`` returns a list of problems, each a sentence with the rank and the instruction. It returns none for a plan in
which

- every instruction names existing stages, ranks and micro-batches, and a rank computes only stages that it holds;
- every forward comes after its input, every backward after its forward and after the gradient of its output;
- every micro-batch passes forward and backward through every stage exactly once, over all replicas;
- a stage's update comes after its reduction, and the reduction after all backwards of the stage;
- every message is received, in the order of sending;
- no rank deadlocks, provided that sends do not wait.
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
StageMicro = tuple[int, int]
"""A stage and a micro-batch."""


class StepProgress:
    """The state of one rank while ``check`` walks through its instructions: available inputs, outputs, gradients."""

    def __init__(self, plan: Plan, rank: int) -> None:
        self._last = plan.stages - 1
        self._is_server = rank in plan.servers
        self._slices = set(range(len(plan.servers)))
        self._backwards_expected = {
            stage: sum(one.kind in GRADIENT_KINDS and one.stage == stage for one in plan.ranks[rank])
            for stage in plan.held_by(rank)
        }
        self._computes = any(self._backwards_expected.values())
        self._must_update = set(plan.held_by(rank)) if not plan.servers else set()
        self._inputs: set[StageMicro] = set()
        self._gradients: set[StageMicro] = set()
        self._forwards: set[StageMicro] = set()
        self._backwards: set[StageMicro] = set()
        self._half_backwards: set[StageMicro] = set()
        """Backwards whose input half is done and whose weight half is not."""
        self._backwards_done: dict[int, int] = dict.fromkeys(self._backwards_expected, 0)
        self._got: set[int] = set()
        self._pushed: set[int] = set()
        self._reduced: set[int] = set()
        self._taken: set[int] = set()
        self._updated: set[int] = set()

    def advance(self, one: Instruction) -> Iterator[str]:
        """Records the next instruction; yields the problems with it at this point."""
        key = one.stage, one.micro
        match one.kind:
            case InstructionKind.LOAD | InstructionKind.RECV_INPUT:
                if (one.kind is InstructionKind.LOAD) != (one.stage == 0):
                    yield "is not how that stage gets its input: stage 0 loads, the others receive"
                yield from self._add_once(self._inputs, key, "that input is already there")
            case InstructionKind.RECV_GRADIENT:
                if one.stage == self._last:
                    yield "is of the last stage, whose gradient no rank sends"
                yield from self._add_once(self._gradients, key, "that gradient is already there")
            case InstructionKind.FORWARD:
                if key not in self._inputs:
                    yield "comes before its input"
                if self._got != self._slices:
                    yield f"comes before the weights of slices {sorted(self._slices - self._got)}"
                yield from self._add_once(self._forwards, key, "was computed before")
                self._inputs.add((one.stage + 1, one.micro))
            case InstructionKind.SEND_OUTPUT:
                if key not in self._forwards:
                    yield "comes before the forward that makes it"
            case InstructionKind.BACKWARD | InstructionKind.BACKWARD_INPUT:
                if key not in self._forwards:
                    yield "comes before its forward"
                if one.stage != self._last and key not in self._gradients:
                    yield "comes before its gradient"
                yield from self._add_once(self._backwards, key, "was computed before")
                self._gradients.add((one.stage - 1, one.micro))
                if one.kind is InstructionKind.BACKWARD_INPUT:
                    self._half_backwards.add(key)
                else:
                    self._backwards_done[one.stage] += 1
            case InstructionKind.BACKWARD_WEIGHT:
                if key not in self._half_backwards:
                    yield "comes before its other half, or twice"
                self._half_backwards.discard(key)
                self._backwards_done[one.stage] += 1
            case InstructionKind.SEND_GRADIENT:
                if key not in self._backwards:
                    yield "comes before the backward that makes it"
            case _:
                yield from self._advance_weights(one)

    def finish(self) -> Iterator[str]:
        """Yields the instructions that are missing at the end of the list."""
        for stage, micro in sorted(self._half_backwards):
            yield f"{Instruction(InstructionKind.BACKWARD_WEIGHT, stage, micro)} is missing"
        for stage in sorted(self._must_update - self._updated):
            yield f"{Instruction(InstructionKind.UPDATE, stage)} is missing"
        for number in sorted(self._taken):
            yield f"{Instruction(InstructionKind.UPDATE, number)} is missing after the last gradients that were taken"
        if self._computes and self._pushed != self._slices:
            yield f"the gradients of slices {sorted(self._slices - self._pushed)} are never pushed"

    def _advance_weights(self, one: Instruction) -> Iterator[str]:
        """``advance`` for instructions on a whole stage or a slice of the weights."""
        match one.kind:
            case InstructionKind.GET:
                self._got.add(one.stage)
            case InstructionKind.PUSH:
                yield from self._check_backwards_done(0)
                yield from self._add_once(self._pushed, one.stage, "was pushed before")
            case InstructionKind.TAKE:
                if one.stage in self._reduced:
                    yield "comes after the gradients are added up"
                self._taken.add(one.stage)
            case InstructionKind.REDUCE:
                if self._is_server:
                    if one.stage not in self._taken:
                        yield "adds up nothing: no gradients were taken"
                else:
                    yield from self._check_backwards_done(one.stage)
                yield from self._add_once(self._reduced, one.stage, "was added up before")
            case InstructionKind.GATHER:
                yield "is in a plan: ranks with a sharded update gather the weights outside of it"
            case InstructionKind.UPDATE if self._is_server:
                if one.stage not in self._taken:
                    yield "comes before any gradient was taken"
                self._taken.discard(one.stage)
            case InstructionKind.UPDATE:
                if one.stage not in self._reduced:
                    yield "comes before its gradients are added up"
                yield from self._add_once(self._updated, one.stage, "was updated before")

    def _check_backwards_done(self, stage: int) -> Iterator[str]:
        missing = self._backwards_expected.get(stage, 0) - self._backwards_done.get(stage, 0)
        if missing:
            yield f"comes before {missing} of its {self._backwards_expected[stage]} backwards"

    @staticmethod
    def _add_once(seen: set[T], item: T, problem: str) -> Iterator[str]:
        if item in seen:
            yield problem
        seen.add(item)


_SLICE_KINDS = frozenset({InstructionKind.PUSH, InstructionKind.GET, InstructionKind.TAKE, InstructionKind.GIVE})
_SERVER_KINDS = frozenset({InstructionKind.TAKE, InstructionKind.GIVE, InstructionKind.REDUCE, InstructionKind.UPDATE})


def check(plan: Plan) -> list[str]:
    """The problems of a plan, as sentences; empty if the plan is valid."""
    problems = [*_check_numbers(plan)]
    if problems:
        return problems
    for rank, instructions in enumerate(plan.ranks):
        progress = StepProgress(plan, rank)
        for one in instructions:
            problems += [f"rank {rank}: {one} {problem}" for problem in progress.advance(one)]
        problems += [f"rank {rank}: {problem}" for problem in progress.finish()]
    return [*problems, *_check_coverage(plan), *_check_messages(plan), *_check_deadlock(plan)]


def _check_numbers(plan: Plan) -> Iterator[str]:
    """Stage, rank, slice and micro-batch numbers out of range. Later checks rely on valid numbers."""
    for what, groups in (("stage", plan.holders), ("slice", [(rank,) for rank in plan.servers])):
        for number, ranks in enumerate(groups):
            if not ranks or not set(ranks) <= set(range(plan.size)) or len(set(ranks)) < len(ranks):
                yield f"{what} {number} is held by ranks {list(ranks)}, of {plan.size} ranks"
    held = [set(plan.held_by(rank)) for rank in range(plan.size)]
    for rank, one in plan:
        own_slices = [number for number, server in enumerate(plan.servers) if server == rank]
        if one.kind in _SLICE_KINDS or own_slices:
            allowed = (
                range(len(plan.servers)) if one.kind in {InstructionKind.PUSH, InstructionKind.GET} else own_slices
            )
            if own_slices and one.kind not in _SERVER_KINDS:
                yield f"rank {rank}: {one} is no instruction of a server"
            elif one.stage not in allowed:
                yield f"rank {rank}: {one} is of slice {one.stage}, not one of {list(allowed)}"
        elif one.stage not in held[rank]:
            yield f"rank {rank}: {one} is of a stage that it does not hold; it holds {sorted(held[rank])}"
        if one.kind in PER_MICRO and not 0 <= one.micro < plan.num_microbatches:
            yield f"rank {rank}: {one} is of a micro-batch that is not there; there are {plan.num_microbatches}"
        if one.kind in WITH_PEER and (not 0 <= one.peer < plan.size or one.peer == rank):
            yield f"rank {rank}: {one} has no such peer; there are {plan.size} ranks"


def _check_coverage(plan: Plan) -> Iterator[str]:
    """Each (stage, micro-batch) that is not computed exactly once forward and once backward."""
    computed = Counter(
        (one.kind in BACKWARD_KINDS, one.stage, one.micro)
        for _, one in plan
        if one.kind in BACKWARD_KINDS or one.kind is InstructionKind.FORWARD
    )
    for stage in range(plan.stages):
        for micro in range(plan.num_microbatches):
            for backward in (False, True):
                times = computed[backward, stage, micro]
                if times != 1:
                    name = Instruction(InstructionKind.BACKWARD if backward else InstructionKind.FORWARD, stage, micro)
                    yield f"{name} happens {times} times over all ranks, not once"


def _check_messages(plan: Plan) -> Iterator[str]:
    """Compares the sends of each pair of ranks with the receives, in order."""
    sent: dict[tuple[int, int], list[Instruction]] = {}
    received: dict[tuple[int, int], list[Instruction]] = {}
    for rank, one in plan:
        if one.kind in SENDS:
            sent.setdefault((rank, one.peer), []).append(one.counterpart(rank))
        elif one.kind in RECEIVES:
            received.setdefault((one.peer, rank), []).append(one)
    for pair in sorted(sent.keys() | received.keys()):
        source, target = pair
        outgoing, incoming = sent.get(pair, []), received.get(pair, [])
        for position, (message, expected) in enumerate(zip(outgoing, incoming, strict=False)):
            if message != expected:
                yield (
                    f"rank {target}: {expected} is message {position} from rank {source}, "
                    f"which sends {message.counterpart(target)} there: order or kind differ"
                )
                break
        else:
            for message in outgoing[len(incoming) :]:
                yield f"rank {source}: {message.counterpart(target)} is never received"
            for expected in incoming[len(outgoing) :]:
                yield f"rank {target}: {expected} is never sent"


def _check_deadlock(plan: Plan) -> Iterator[str]:
    for rank, one in timeline(plan).stuck:
        yield f"rank {rank}: waits for ever at {one}"
