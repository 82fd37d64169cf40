"""Checkpoints of a user's own loop: the reporting rank writes them, the process that starts the job reads one."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from hoop.collectives.rank_context import RankContext
from hoop.engine.fault_tolerance.checkpoint_format import verified
from hoop.errors import FailedPrecondition, InvalidArgument
from hoop.files import make_folder
from hoop.job_events import CheckpointWritten, Emit, JobEvent, SnapshotTaken, Warned
from hoop.runs.checkpoint_store import FOLDER, CheckpointWriter, Snapshot, listed, newest_checkpoint, set_aside, step_of

log = logging.getLogger("hoop.elastic")
FLUSH_S = 60.0
"""Seconds that the end of a run waits for the disk."""

Resume = bool | Literal["auto"]


class LoopCheckpoints:
    """The checkpoints in ``out``, as ``hoop.train`` writes them; without a folder there are none."""

    def __init__(self, out: str | Path | None, keep: int, resume: Resume) -> None:
        if resume not in (True, False, "auto"):
            raise InvalidArgument(f"resume: {resume!r} is not True, False or 'auto'")
        if out is None and resume:
            raise InvalidArgument("resume: it needs out, the folder of the run to go on with")
        self._out = None if out is None else Path(out)
        self._resume = resume
        self._writer = None if self._out is None else CheckpointWriter(self._out / FOLDER, keep)

    def newest(self) -> bytes | None:
        """The checkpoint to resume from; None: the run begins at step 0. The process that starts the job calls it."""
        if self._out is None:
            return None
        make_folder(self._out / FOLDER, "out")
        there = bool(listed(self._out))
        if not self._resume or (self._resume == "auto" and not there):
            if there:
                raise FailedPrecondition(f"out: {self._out} holds a run; go on with it by resume=True, or name another")
            return None
        found = newest_checkpoint(self._out)
        for warning in found.warnings:
            log.warning("%s", warning)
        set_aside(self._out, step_of(found.path))
        return found.path.read_bytes()

    def writing(self, emit: Emit, context: RankContext) -> Emit:
        """``emit``, which also writes the snapshots of this rank to the folder."""
        writer = self._writer
        if writer is None:
            return emit

        def emit_and_write(event: JobEvent) -> None:
            emit(event)
            if isinstance(event, SnapshotTaken):
                buffer = next(one for one in context.arena.buffers() if one.name == event.buffer)
                data = bytes(context.arena.read(buffer.address, event.bytes))
                found = verified(data, event.buffer)
                writer.offer(Snapshot(event.steps, found.tensors, found.metadata, found.checksums))
            for written in writer.new_events():
                _log(written)

        return emit_and_write

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        if self._writer is not None:
            self._writer.flush(FLUSH_S)
            self._writer.close(FLUSH_S)
            for event in self._writer.new_events():
                _log(event)


def _log(event: JobEvent) -> None:
    match event:
        case CheckpointWritten():
            log.info("checkpoint after %d steps: %s", event.steps, event.file)
        case Warned():
            log.warning("%s", event.text)
