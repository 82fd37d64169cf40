"""RingTMP (ring model parallel): stages around a ring of devices, each device driven by its neighbours' messages.

There is no schedule and no scheduler. With v slices per device the ring closes: 3 devices, 2 slices:

    stage 0 ──▶ stage 1 ──▶ stage 2          rank 0 holds stages 0 and 3
       rank 0      rank 1      rank 2        rank 1 holds stages 1 and 4
       ▲                         │           rank 2 holds stages 2 and 5
       └── stage 3 ◀─────────────┘

Each device follows ``RingRule``; the first line that applies decides:

    state                                                  action
    1 a message has arrived                                receive it
    2 all backwards of a step are done                     reduce gradients, update weights
    3 the gradient for a backward is available             compute the backward: the oldest micro-batch first
    4 the input of a forward is available, and allowed     compute the forward: the last stage first
    5 otherwise                                            wait for a message

A forward is allowed if the device already holds the micro-batch (in an earlier slice) or holds fewer than ``limit``
micro-batches, and if its weights have had enough updates. The ring cannot deadlock: micro-batches enter in order, so
only older micro-batches can block one, and nothing blocks the oldest.

Weight versions count updates. ``delay`` is the number of steps by which the weights may lag:

    delay 0   synchronous: step k uses version k. Each step ends with a flush. Exactly SGD.
    delay 1   asynchronous: step k uses version k-1 (step 0: version 0). Steps overlap without a flush. A device keeps
              the two newest versions. Every device uses the same version for a micro-batch, forward and backward, so
              the result does not depend on timing: W(k+1) = W(k) - lr · gradient at W(k-1).
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
from hoop.strategies.base import check_sizes, check_slices


class RingRule:
    """The rule of one device of the ring."""

    def __init__(self, plan: Plan, rank: int, steps: int, limit: int, delay: int) -> None:
        self._rank = rank
        self._holder = [ranks[0] for ranks in plan.holders]
        self._held = plan.held_by(rank)
        self._num_microbatches = plan.num_microbatches
        self._steps = steps
        self._limit = limit
        self._delay = delay
        self._queue: deque[Instruction] = deque()
        self._inputs: dict[int, deque[int]] = {stage: deque() for stage in self._held}
        self._gradients: dict[int, deque[int]] = {stage: deque() for stage in self._held}
        self._num_entered = 0
        self._num_left = 0
        self._backwards = [0] * steps
        self._updates = 0
        if 0 in self._inputs:
            self._inputs[0].extend(range(plan.num_microbatches * steps))

    @property
    def finished(self) -> bool:
        return self._updates == self._steps and not self._queue

    def weight_version(self, micro: int) -> int | None:
        return max(0, micro // self._num_microbatches - self._delay)

    def on_message(self, message: Instruction) -> None:
        ready = self._inputs if message.kind is InstructionKind.RECV_INPUT else self._gradients
        ready[message.stage].append(message.micro)
        self._queue.append(message)

    def next(self) -> Instruction | None:
        if not self._queue:
            self._choose()
        return self._queue.popleft() if self._queue else None

    def _choose(self) -> None:
        """Queues the next computation and the instructions that directly follow it."""
        ready = [(microbatches[0], -stage) for stage, microbatches in self._gradients.items() if microbatches]
        if ready:
            self._backward(-min(ready)[1])
            return
        for stage in reversed(self._held):
            if self._inputs[stage] and self._allowed(stage, self._inputs[stage][0]):
                self._forward(stage)
                return

    def _allowed(self, stage: int, micro: int) -> bool:
        version = self.weight_version(micro)
        assert version is not None
        admitted = stage != self._held[0] or self._num_entered - self._num_left < self._limit
        return admitted and self._updates >= version

    def _forward(self, stage: int) -> None:
        micro = self._inputs[stage].popleft()
        self._num_entered += stage == self._held[0]
        if stage == 0:
            self._queue.append(Instruction(InstructionKind.LOAD, 0, micro))
        self._queue.append(Instruction(InstructionKind.FORWARD, stage, micro))
        if stage + 1 == len(self._holder):
            self._gradients[stage].append(micro)
        elif self._holder[stage + 1] == self._rank:
            self._inputs[stage + 1].append(micro)
        else:
            self._queue.append(Instruction(InstructionKind.SEND_OUTPUT, stage, micro, self._holder[stage + 1]))

    def _backward(self, stage: int) -> None:
        micro = self._gradients[stage].popleft()
        self._num_left += stage == self._held[0]
        self._queue.append(Instruction(InstructionKind.BACKWARD, stage, micro))
        if stage > 0 and self._holder[stage - 1] == self._rank:
            self._gradients[stage - 1].append(micro)
        elif stage > 0:
            self._queue.append(Instruction(InstructionKind.SEND_GRADIENT, stage, micro, self._holder[stage - 1]))
        step = micro // self._num_microbatches
        self._backwards[step] += 1
        if self._backwards[step] == self._num_microbatches * len(self._held):
            self._updates += 1
            self._queue.extend(finish_step(self._held))


@dataclass(frozen=True)
class RingModel:
    """Stages around a ring; each device chooses its next instruction from its neighbours' messages alone."""

    slices: int = 1
    """Number of stages per device."""
    limit: int | None = None
    """Maximum number of micro-batches that a device may hold; None: enough to keep it busy if all devices are equally
    fast."""
    asynchronous: bool = False

    name: ClassVar[str] = "ring"
    replicated: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_slices(self.slices)
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
        return f"{self.name}:" + ",".join(["async" if self.asynchronous else "sync", f"slices={self.slices}", *limit])

    def describe(self) -> str:
        how = "no flush, weights one update old" if self.asynchronous else "a flush a step"
        return f"RingTMP: the model's stages round a ring, each device deciding by its neighbours alone; {how}"

    def stages(self, devices: int) -> int:
        return devices * self.slices

    def max_in_flight(self, rank: int, devices: int) -> int:
        """Number of micro-batches that a device may hold.

        With one slice a micro-batch returns to rank r of p after 3(p-r) units and needs 3 units of the device, so p-r
        micro-batches keep it busy, and the resulting order is 1F1B. With several slices a micro-batch passes the
        device several times at unpredictable moments; twice the ring size loses little time.
        """
        if self.limit is not None:
            return self.limit
        return devices - rank if self.slices == 1 else 2 * devices

    def plan(self, devices: int, num_microbatches: int, speeds: Sequence[float] | None = None) -> Plan:
        """One step, in the order that the rules produce when all devices are equally fast."""
        check_sizes(devices, num_microbatches, speeds, self.stages)
        holders = tuple((stage % devices,) for stage in range(self.stages(devices)))
        empty = Plan(num_microbatches, holders, ((),) * devices)
        return Plan(num_microbatches, holders, run_rules([self._rule(empty, rank, 1) for rank in range(devices)]))

    def rule(self, plan: Plan, rank: int, steps: int = 1) -> Rule | None:
        return self._rule(plan, rank, steps)

    def _rule(self, plan: Plan, rank: int, steps: int) -> RingRule:
        return RingRule(plan, rank, steps, self.max_in_flight(rank, plan.size), int(self.asynchronous))
