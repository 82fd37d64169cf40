"""The rule of RingTMP: a device looks at what its two neighbours have delivered, and at how much it may hold.

    what it sees                                          what it does
    1 a message                                           receives it
    2 everything of a step is backward                    adds its gradients up, updates its weights
    3 a backward whose gradient is there                  computes it: the oldest micro-batch first
    4 a forward whose input is there, and is allowed      computes it: the furthest stage first
    5 none of these                                       waits for its neighbours

A forward is allowed if the micro-batch is here already (a later slice of it), or if fewer than ``limit`` are; and if
the weights it is to use have been updated far enough. Nobody waits for ever: micro-batches come in order, so what keeps
one out is held by older ones, and the oldest of all is kept out by nothing.

Weights have versions, counted in updates. ``delay`` says by how many steps they may be behind:

    delay 0   step k uses version k: it begins when step k-1 is over, which is a flush. Exactly SGD.
    delay 1   step k uses version k-1 (step 0 version 0): steps overlap and there is no flush. A device keeps the newest
              version and the one before it; every device uses the same version for the same micro-batch, forward and
              backward, so the result depends on no timing. This is W(k+1) = W(k) - lr · gradient at W(k-1).

RingTMP, ring model parallel: stages round a ring, and every device decides by what its neighbours delivered.

There is no schedule and no scheduler. With v slices a device the ring closes on itself: 3 devices, 2 slices:

    stage 0 ──▶ stage 1 ──▶ stage 2          rank 0 holds stages 0 and 3
       rank 0      rank 1      rank 2        rank 1 holds stages 1 and 4
       ▲                         │           rank 2 holds stages 2 and 5
       └── stage 3 ◀─────────────┘

Synchronously it ends each step with a flush, and trains exactly like one device. Asynchronously the next step's
micro-batches follow at once, with weights one update old (strategies/ring.py says which, and why nobody waits for
ever).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from hoop.errors import InvalidArgument
from hoop.plan.builder import finish_step
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan
from hoop.plan.rules import Rule
from hoop.plan.unit_clock import run_rules
from hoop.strategies.base import check_sizes


class RingRule:
    """What one device of the ring does next."""

    def __init__(self, plan: Plan, rank: int, steps: int, limit: int, delay: int) -> None:
        self._rank = rank
        self._holder = [ranks[0] for ranks in plan.holders]
        self._held = plan.held_by(rank)
        self._micros = plan.micros
        self._steps = steps
        self._limit = limit
        self._delay = delay
        self._queue: deque[Instruction] = deque()
        self._inputs: dict[int, deque[int]] = {stage: deque() for stage in self._held}
        self._gradients: dict[int, deque[int]] = {stage: deque() for stage in self._held}
        self._entered = 0
        self._left = 0
        self._backwards = [0] * steps
        self._updates = 0
        if 0 in self._inputs:
            self._inputs[0].extend(range(plan.micros * steps))

    @property
    def finished(self) -> bool:
        return self._updates == self._steps and not self._queue

    def version(self, micro: int) -> int | None:
        return max(0, micro // self._micros - self._delay)

    def arrived(self, message: Instruction) -> None:
        ready = self._inputs if message.kind is InstructionKind.RECV_INPUT else self._gradients
        ready[message.stage].append(message.micro)
        self._queue.append(message)

    def next(self) -> Instruction | None:
        if not self._queue:
            self._choose()
        return self._queue.popleft() if self._queue else None

    def _choose(self) -> None:
        """Queues what to compute, and what follows from it at once."""
        ready = [(micros[0], -stage) for stage, micros in self._gradients.items() if micros]
        if ready:
            self._backward(-min(ready)[1])
            return
        for stage in reversed(self._held):
            if self._inputs[stage] and self._allowed(stage, self._inputs[stage][0]):
                self._forward(stage)
                return

    def _allowed(self, stage: int, micro: int) -> bool:
        version = self.version(micro)
        assert version is not None
        here = stage != self._held[0] or self._entered - self._left < self._limit
        return here and self._updates >= version

    def _forward(self, stage: int) -> None:
        micro = self._inputs[stage].popleft()
        self._entered += stage == self._held[0]
        if stage == 0:
            self._queue.append(Instruction(InstructionKind.LOAD, 0, micro))
        self._queue.append(Instruction(InstructionKind.FORWARD, stage, micro))
        if stage + 1 == len(self._holder):
            self._gradients[stage].append(micro)
        elif self._holder[stage + 1] == self._rank:
            self._inputs[stage + 1].append(micro)
        else:
            self._queue.append(
                Instruction(InstructionKind.SEND_OUTPUT, stage, micro, self._holder[stage + 1])
            )

    def _backward(self, stage: int) -> None:
        micro = self._gradients[stage].popleft()
        self._left += stage == self._held[0]
        self._queue.append(Instruction(InstructionKind.BACKWARD, stage, micro))
        if stage > 0 and self._holder[stage - 1] == self._rank:
            self._gradients[stage - 1].append(micro)
        elif stage > 0:
            self._queue.append(
                Instruction(InstructionKind.SEND_GRADIENT, stage, micro, self._holder[stage - 1])
            )
        step = micro // self._micros
        self._backwards[step] += 1
        if self._backwards[step] == self._micros * len(self._held):
            self._updates += 1
            self._queue.extend(finish_step(self._held))


@dataclass(frozen=True)
class RingModel:
    """Stages round a ring, each device deciding by its neighbours alone."""

    slices: int = 1
    """Stages a device."""
    limit: int | None = None
    """Micro-batches a device may hold; None: as many as keep it busy if all devices are equally fast."""
    asynchronous: bool = False

    name: ClassVar[str] = "ring"

    def __post_init__(self) -> None:
        if self.slices < 1:
            raise InvalidArgument(f"slices: {self.slices}; a device holds at least 1")
        if self.limit is not None and self.limit < 1:
            raise InvalidArgument(f"limit: {self.limit}; a device must be allowed at least 1 micro-batch")

    @property
    def synchronous(self) -> bool:
        return not self.asynchronous

    @property
    def versions(self) -> int:
        return 2 if self.asynchronous else 1

    @property
    def spec(self) -> str:
        limit = [] if self.limit is None else [f"limit={self.limit}"]
        return f"{self.name}:" + ",".join(
            ["async" if self.asynchronous else "sync", f"slices={self.slices}", *limit]
        )

    def describe(self) -> str:
        how = "no flush, weights one update old" if self.asynchronous else "a flush a step"
        return (
            f"RingTMP: the model's stages round a ring, each device deciding by its neighbours alone; {how}"
        )

    def stages(self, devices: int) -> int:
        return devices * self.slices

    def may_hold(self, rank: int, devices: int) -> int:
        """How many micro-batches a device may hold.

        With one slice a micro-batch comes back to rank r of p after 3(p-r) units of time and asks for 3 of the
        device's, so p-r of them keep it busy, and the order that follows is 1F1B's. With several slices a device meets
        the same micro-batch again in between and never knows when: twice the ring loses little.
        """
        if self.limit is not None:
            return self.limit
        return devices - rank if self.slices == 1 else 2 * devices

    def plan(self, devices: int, micros: int, speeds: Sequence[float] | None = None) -> Plan:
        """One step, in the order that the rules find when all devices are equally fast."""
        check_sizes(devices, micros, speeds)
        holders = tuple((stage % devices,) for stage in range(self.stages(devices)))
        empty = Plan(micros, holders, ((),) * devices)
        return Plan(micros, holders, run_rules([self._rule(empty, rank, 1) for rank in range(devices)]))

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return self._rule(plan, rank, steps)

    def _rule(self, plan: Plan, rank: int, steps: int) -> RingRule:
        return RingRule(plan, rank, steps, self.may_hold(rank, plan.size), int(self.asynchronous))
