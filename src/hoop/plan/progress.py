"""How far one rank has come in a step, and whether what it does next makes sense there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from hoop.plan.instructions import GRADIENT_KINDS, Instruction, Kind
from hoop.plan.plan import Plan

T = TypeVar("T")
Place = tuple[int, int]
"""A stage and a micro-batch."""


class Progress:
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
            case Kind.LOAD | Kind.RECV_INPUT:
                if (one.kind is Kind.LOAD) != (one.stage == 0):
                    yield "is not how that stage gets its input: stage 0 loads, the others receive"
                yield from self._new(self._inputs, place, "that input is already there")
            case Kind.RECV_GRADIENT:
                if one.stage == self._last:
                    yield "is of the last stage, whose gradient nobody sends"
                yield from self._new(self._gradients, place, "that gradient is already there")
            case Kind.FORWARD:
                if place not in self._inputs:
                    yield "comes before its input"
                if self._got != self._slices:
                    yield f"comes before the weights of slices {sorted(self._slices - self._got)}"
                yield from self._new(self._forwards, place, "was computed before")
                self._inputs.add((one.stage + 1, one.micro))
            case Kind.SEND_OUTPUT:
                if place not in self._forwards:
                    yield "comes before the forward that makes it"
            case Kind.BACKWARD | Kind.BACKWARD_INPUT:
                if place not in self._forwards:
                    yield "comes before its forward"
                if one.stage != self._last and place not in self._gradients:
                    yield "comes before its gradient"
                yield from self._new(self._backwards, place, "was computed before")
                self._gradients.add((one.stage - 1, one.micro))
                if one.kind is Kind.BACKWARD_INPUT:
                    self._halves.add(place)
                else:
                    self._done[one.stage] += 1
            case Kind.BACKWARD_WEIGHT:
                if place not in self._halves:
                    yield "comes before its other half, or twice"
                self._halves.discard(place)
                self._done[one.stage] += 1
            case Kind.SEND_GRADIENT:
                if place not in self._backwards:
                    yield "comes before the backward that makes it"
            case _:
                yield from self._weights(one)

    def end(self) -> Iterator[str]:
        """What is missing at the end of the list."""
        for stage, micro in sorted(self._halves):
            yield f"{Instruction(Kind.BACKWARD_WEIGHT, stage, micro)} is missing"
        for stage in sorted(self._holds - self._updated):
            yield f"{Instruction(Kind.UPDATE, stage)} is missing"
        for number in sorted(self._taken):
            yield f"{Instruction(Kind.UPDATE, number)} is missing after the last gradients that were taken"
        if self._computes and self._pushed != self._slices:
            yield f"the gradients of slices {sorted(self._slices - self._pushed)} are never pushed"

    def _weights(self, one: Instruction) -> Iterator[str]:
        """Instructions about a whole stage, or a slice of the weights."""
        match one.kind:
            case Kind.GET:
                self._got.add(one.stage)
            case Kind.PUSH:
                yield from self._finished(0)
                yield from self._new(self._pushed, one.stage, "was pushed before")
            case Kind.TAKE:
                if one.stage in self._reduced:
                    yield "comes after the gradients are added up"
                self._taken.add(one.stage)
            case Kind.REDUCE:
                if self._serves:
                    if one.stage not in self._taken:
                        yield "adds up nothing: no gradients were taken"
                else:
                    yield from self._finished(one.stage)
                yield from self._new(self._reduced, one.stage, "was added up before")
            case Kind.UPDATE if self._serves:
                if one.stage not in self._taken:
                    yield "comes before any gradient was taken"
                self._taken.discard(one.stage)
            case Kind.UPDATE:
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
