"""Fault injection: carries out the faults that ``Settings.faults`` places at this rank. ``plan/faults.py`` parses them.

The injector is a hook that the executor calls before every instruction. An executor without faults has no hook and
pays nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence

from hoop.engine.executor import PlanExecutor
from hoop.job_events import Emit, FaultInjected
from hoop.plan.faults import LINK_FAULTS, Fault
from hoop.plan.instructions import Instruction
from hoop.transport.fault_injection import FaultyLinks

FLUSH_TIMEOUT_S = 10.0
"""Seconds that a process that is about to die waits until its ``fault`` event has been sent."""


class FaultInjector:
    """The faults of one rank. Each happens once."""

    def __init__(self, faults: Sequence[Fault], emit: Emit, flush_events: Callable[[float], bool]) -> None:
        """``flush_events(timeout_s)``: waits until all emitted events have left this process."""
        self._pending = list(faults)
        self._emit, self._flush_events = emit, flush_events
        self._executor: PlanExecutor | None = None
        self._factor = 1.0
        self._links = FaultyLinks()
        if any(fault.kind in LINK_FAULTS for fault in faults):
            self._links.install()

    def attach(self, executor: PlanExecutor) -> None:
        """Hooks into this executor; called again for each new executor after the model is resharded."""
        self._executor = executor
        executor.add_instruction_hook(self._before_instruction)
        self._apply_slowdown()

    def _before_instruction(self, step: int, instruction: Instruction) -> None:
        for fault in list(self._pending):
            if fault.is_due(step, instruction.kind):
                self._pending.remove(fault)
                self._emit(FaultInjected(str(fault), step, before=str(instruction)))
                self._inject(fault)

    def _inject(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._flush_events(FLUSH_TIMEOUT_S)
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                self._flush_events(FLUSH_TIMEOUT_S)
                if fault.seconds:  # a stopped process cannot continue itself: another process must
                    command = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
                    subprocess.Popen(["/bin/sh", "-c", command], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                self._factor = fault.factor
                self._apply_slowdown()
            case "corrupt":
                self._links.flips += 1
            case "drop":
                self._links.drops += 1
            case "partition":
                self._links.partitioned = True

    def _apply_slowdown(self) -> None:
        if self._executor is not None and self._factor > 1:
            self._executor.extra_slowdown = self._factor - 1
