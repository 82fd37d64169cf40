"""Carries out the faults that are placed at this rank.

It sees a worker's instructions before they are run; a worker that nothing is to befall is not looked at, and pays
nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence

from hoop.engine.executor import PlanExecutor
from hoop.engine.progress_reporter import Emit
from hoop.plan.faults import OF_LINKS, Fault
from hoop.plan.instructions import Instruction
from hoop.transport.fault_injection import FaultyLinks

TOLD_S = 1.0
"""A process that is to die tells of it first; if nobody has listened so long, nobody does."""


class FaultInjector:
    """What befalls one rank; each fault once."""

    def __init__(self, faults: Sequence[Fault], emit: Emit, heard: Callable[[float], bool]) -> None:
        """``heard`` waits so many seconds until all that was emitted has left this process."""
        self._due = list(faults)
        self._emit, self._heard = emit, heard
        self._worker: PlanExecutor | None = None
        self._factor = 1.0
        self._links = FaultyLinks()
        if any(fault.kind in OF_LINKS for fault in faults):
            self._links.install()

    def befall(self, worker: PlanExecutor) -> None:
        """Looks before every instruction of this worker."""
        self._worker = worker
        worker.before(self._look)
        self._slow()

    def _look(self, step: int, instruction: Instruction) -> None:
        for fault in list(self._due):
            if fault.is_due(step, instruction.kind):
                self._due.remove(fault)
                told = {"fault": str(fault), "step": step, "before": str(instruction)}
                self._emit({"kind": "fault", **told})
                self._happen(fault)

    def _happen(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._heard(TOLD_S)
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                self._heard(TOLD_S)
                if fault.seconds:  # somebody must be left to end it
                    again = f"sleep {fault.seconds}; kill -CONT {os.getpid()}"
                    subprocess.Popen(["/bin/sh", "-c", again], start_new_session=True)
                os.kill(os.getpid(), signal.SIGSTOP)
            case "slow":
                self._factor = fault.factor
                self._slow()
            case "corrupt":
                self._links.flips += 1
            case "drop":
                self._links.drops += 1
            case "partition":
                self._links.partitioned = True

    def _slow(self) -> None:
        if self._worker is not None and self._factor > 1:
            self._worker.drag = self._factor - 1
