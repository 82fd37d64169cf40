"""Profiles one rank: seconds spent in compute, communication and waiting, and a trace of some steps.

``PlanExecutor`` and ``RuleExecutor`` record every instruction they run. The trainer sets ``tracing`` for the first
steps, and emits the result when the job ends. ``LiveActivity`` reads the sums while the job runs, and sets ``tracing``
for a few steps when a client asks for a trace. ``report/trace.py`` writes the file ``trace.json``.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hoop.plan.instructions import CATEGORY, COMMUNICATE, COMPUTE, IDLE, OTHER, SHARE, Instruction


@dataclass
class InstructionProfiler:
    """Accumulates the time of one rank. All times are in seconds, from ``now``."""

    category_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(SHARE, 0.0))
    """Total seconds of each category. The keys never change: another thread may read it at any time."""
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    """Instruction, category, start and seconds of every traced instruction."""
    tracing: bool = False
    """True while instructions are appended to ``spans``."""
    instructions: int = 0
    """Number of instructions executed."""
    last_end: float = 0.0
    """Time when the last recorded work ended."""

    @property
    def seconds(self) -> dict[str, float]:
        """Total time by kind of work: compute, communicate and idle."""
        found = {COMPUTE: 0.0, COMMUNICATE: 0.0, IDLE: 0.0}
        for category, seconds in self.category_seconds.items():
            found[SHARE[category]] += seconds
        return found

    def record(self, instruction: Instruction, started: float, ended: float, waited: float = 0.0) -> None:
        """Record an executed instruction. ``waited`` seconds of it count as idle time."""
        category = CATEGORY[instruction.kind]
        self.category_seconds[category] += ended - started - waited
        self.category_seconds["wait"] += waited
        self.instructions += 1
        self.last_end = ended
        if self.tracing:
            if waited:
                self.spans.append(("wait", "wait", started, waited))
            self.spans.append((str(instruction), category, started + waited, ended - started - waited))

    def record_prefetch(self, load: Instruction, started: float, seconds: float) -> None:
        """Record the part of a load of the next step that was done while this rank waited for others.

        In the trace it is the first part of the instruction that waited, which ``record`` adds without it.
        """
        self._record_span(str(load), CATEGORY[load.kind], started, started + seconds)

    def record_overhead(self) -> None:
        """Trace the time since the last recorded work: what the training loop does between two steps."""
        self._trace_overhead(now())

    def record_other(self, name: str, started: float) -> None:
        """Trace work that is no instruction, from ``started`` until now: a commit, an evaluation or a snapshot."""
        self._trace_overhead(started)
        self.last_end = now()
        if self.tracing:
            self.spans.append((name, OTHER, started, self.last_end - started))

    def _trace_overhead(self, ended: float) -> None:
        if self.tracing and self.last_end:
            self.spans.append(("between steps", OTHER, self.last_end, ended - self.last_end))
        self.last_end = ended

    def record_deferred(self, instruction: Instruction, started: float, ended: float) -> None:
        """Record deferred work of an instruction. In the trace it replaces the instruction's last span."""
        category = CATEGORY[instruction.kind]
        self.category_seconds[category] += ended - started
        self.last_end = ended
        if self.tracing:
            name = str(instruction)
            at = max((index for index, span in enumerate(self.spans) if span[0] == name), default=None)
            if at is not None:
                del self.spans[at]
            self.spans.append((name, category, started, ended - started))

    def prepend(self, earlier: InstructionProfiler) -> None:
        """Put the records of an earlier profiler of this rank before the records of this one."""
        for category, seconds in earlier.category_seconds.items():
            self.category_seconds[category] += seconds
        self.spans = earlier.spans + self.spans
        self.instructions += earlier.instructions

    def record_wait(self, started: float, ended: float) -> None:
        """Record time in which a rule waited for a message and had nothing to execute."""
        self._record_span("wait", "wait", started, ended)

    def record_receive(self, message: Instruction, started: float, ended: float) -> None:
        """Record the receive of a message that had arrived, or had begun to arrive."""
        self._record_span(str(message), "recv", started, ended)

    def _record_span(self, name: str, category: str, started: float, ended: float) -> None:
        self.category_seconds[category] += ended - started
        if self.tracing:
            self.spans.append((name, category, started, ended - started))


now = time.perf_counter
