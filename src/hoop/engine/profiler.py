"""Where a device's time goes: compute, communication, waiting; and every instruction of the first steps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from hoop.plan.instructions import CATEGORY, COMMUNICATE, COMPUTE, IDLE, SHARE, Instruction


@dataclass
class InstructionProfiler:
    """One device's account of its time."""

    seconds: dict[str, float] = field(default_factory=lambda: {COMPUTE: 0.0, COMMUNICATE: 0.0, IDLE: 0.0})
    spans: list[tuple[str, str, float, float]] = field(default_factory=list)
    """(instruction, category, start, seconds) of the steps that are traced."""
    tracing: bool = False
    instructions: int = 0

    def note(self, instruction: Instruction, started: float, ended: float, waited: float = 0.0) -> None:
        """An instruction ran from then to then, and waited so long of it."""
        category = CATEGORY[instruction.kind]
        self.seconds[SHARE[category]] += ended - started - waited
        self.seconds[IDLE] += waited
        self.instructions += 1
        if self.tracing:
            if waited:
                self.spans.append(("wait", "wait", started, waited))
            self.spans.append((str(instruction), category, started + waited, ended - started - waited))

    def later(self, instruction: Instruction, started: float, ended: float) -> None:
        """The work of an instruction that was noted before was put off until now: it shows where it was done."""
        category = CATEGORY[instruction.kind]
        self.seconds[SHARE[category]] += ended - started
        if self.tracing:
            name = str(instruction)
            at = max((index for index, span in enumerate(self.spans) if span[0] == name), default=None)
            if at is not None:
                del self.spans[at]
            self.spans.append((name, category, started, ended - started))

    def add(self, before: InstructionProfiler) -> None:
        """What was noted elsewhere comes before what is noted here."""
        self.seconds = {share: seconds + before.seconds[share] for share, seconds in self.seconds.items()}
        self.spans = before.spans + self.spans
        self.instructions += before.instructions

    def waited(self, started: float, ended: float) -> None:
        """Nothing could be done: a rule waited for a message."""
        self._take("wait", "wait", started, ended)

    def received(self, message: Instruction, started: float, ended: float) -> None:
        """A message was taken in that had come already, or had begun to."""
        self._take(str(message), "recv", started, ended)

    def _take(self, name: str, category: str, started: float, ended: float) -> None:
        self.seconds[SHARE[category]] += ended - started
        if self.tracing:
            self.spans.append((name, category, started, ended - started))


now = time.perf_counter
