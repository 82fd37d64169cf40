"""Profiles one rank: seconds spent in compute, communication and waiting, and a trace of the first steps.

``PlanExecutor`` and ``RuleExecutor`` record every instruction they run. The trainer sets ``tracing`` for the first
steps only, and emits the result when the job ends.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hoop.plan.instructions import CATEGORY, COMMUNICATE, COMPUTE, IDLE, SHARE, Instruction


@dataclass
class InstructionProfiler:
    """Accumulates the time of one rank. All times are in seconds, from ``now``."""

    seconds: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, COMMUNICATE: 0.0, IDLE: 0.0})
    """Total time by kind of work."""
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(instruction, category, start, seconds) of every traced instruction."""
    tracing: bool = False
    """Append to ``spans``."""
    instructions: int = 0
    """Number of instructions executed."""

    def record(self, instruction: Instruction, started: float, ended: float, waited: float = 0.0) -> None:
        """Record an executed instruction. ``waited`` seconds of it count as idle time."""
        category = CATEGORY[instruction.kind]
        self.seconds[SHARE[category]] += ended - started - waited
        self.seconds[IDLE] += waited
        self.instructions += 1
        if self.tracing:
            if waited:
                self.spans.append(("wait", "wait", started, waited))
            self.spans.append((str(instruction), category, started + waited, ended - started - waited))

    def record_deferred(self, instruction: Instruction, started: float, ended: float) -> None:
        """Record deferred work of an instruction. In the trace it replaces the instruction's last span."""
        category = CATEGORY[instruction.kind]
        self.seconds[SHARE[category]] += ended - started
        if self.tracing:
            name = str(instruction)
            at = max((index for index, span in enumerate(self.spans) if span[0] == name), default=None)
            if at is not None:
                del self.spans[at]
            self.spans.append((name, category, started, ended - started))

    def prepend(self, earlier: InstructionProfiler) -> None:
        """Put the records of an earlier profiler of this rank before the records of this one."""
        self.seconds = {share: seconds + earlier.seconds[share] for share, seconds in self.seconds.items()}
        self.spans = earlier.spans + self.spans
        self.instructions += earlier.instructions

    def record_wait(self, started: float, ended: float) -> None:
        """Record time in which a rule waited for a message and had nothing to execute."""
        self._record_span("wait", "wait", started, ended)

    def record_receive(self, message: Instruction, started: float, ended: float) -> None:
        """Record the receive of a message that had arrived, or had begun to arrive."""
        self._record_span(str(message), "recv", started, ended)

    def _record_span(self, name: str, category: str, started: float, ended: float) -> None:
        self.seconds[SHARE[category]] += ended - started
        if self.tracing:
            self.spans.append((name, category, started, ended - started))


now = time.perf_counter
