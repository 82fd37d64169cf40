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
"""

from __future__ import annotations

from collections import deque

from hoop.plan.instructions import Instruction, Kind
from hoop.plan.plan import Plan
from hoop.plan.weave import finish


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
        ready = self._inputs if message.kind is Kind.RECV_INPUT else self._gradients
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
            self._queue.append(Instruction(Kind.LOAD, 0, micro))
        self._queue.append(Instruction(Kind.FORWARD, stage, micro))
        if stage + 1 == len(self._holder):
            self._gradients[stage].append(micro)
        elif self._holder[stage + 1] == self._rank:
            self._inputs[stage + 1].append(micro)
        else:
            self._queue.append(Instruction(Kind.SEND_OUTPUT, stage, micro, self._holder[stage + 1]))

    def _backward(self, stage: int) -> None:
        micro = self._gradients[stage].popleft()
        self._left += stage == self._held[0]
        self._queue.append(Instruction(Kind.BACKWARD, stage, micro))
        if stage > 0 and self._holder[stage - 1] == self._rank:
            self._gradients[stage - 1].append(micro)
        elif stage > 0:
            self._queue.append(Instruction(Kind.SEND_GRADIENT, stage, micro, self._holder[stage - 1]))
        step = micro // self._micros
        self._backwards[step] += 1
        if self._backwards[step] == self._micros * len(self._held):
            self._updates += 1
            self._queue.extend(finish(self._held))
