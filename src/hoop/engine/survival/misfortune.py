"""Carries out the faults that are placed at this rank.

A worker's handlers are replaced by ones that look first; a worker that nothing is to befall has its own, and pays
nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence

from hoop.engine.figures import Emit
from hoop.engine.worker import Worker
from hoop.plan.faults import Fault
from hoop.plan.instructions import Instruction
from hoop.transport.faulty import FaultyLinks

TOLD_S = 0.2
"""A process that is to die tells of it first, and waits so long for it to be heard."""
_LINKS = {"corrupt", "drop", "partition"}


class Misfortune:
    """What befalls one rank; each fault once."""

    def __init__(self, faults: Sequence[Fault], emit: Emit) -> None:
        self._due = list(faults)
        self._emit = emit
        self._worker: Worker | None = None
        self._factor = 1.0
        self._links = FaultyLinks()
        if any(fault.kind in _LINKS for fault in faults):
            self._links.install()

    def befall(self, worker: Worker) -> None:
        """Looks before every instruction of this worker. Shards are not computed several at once any more."""
        self._worker = worker
        handlers = worker._handlers
        worker.handle({kind: self._before(handler) for kind, handler in handlers.items()})
        worker._joint = None
        self._slow()

    def _before(self, handler: Callable[[Instruction], None]) -> Callable[[Instruction], None]:
        def look_first(instruction: Instruction) -> None:
            for fault in list(self._due):
                assert self._worker is not None, "an instruction has a worker"
                step = self._worker._position.done + 1
                if fault.is_due(step, instruction.kind):
                    self._due.remove(fault)
                    self._emit(
                        {"kind": "fault", "fault": str(fault), "step": step, "before": str(instruction)}
                    )
                    self._happen(fault)
            handler(instruction)

        return look_first

    def _happen(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                time.sleep(TOLD_S)
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                time.sleep(TOLD_S)
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
            self._worker._drag = self._factor - 1
