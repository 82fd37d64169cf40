"""Checkpoints of a user's own loop: the reporting rank writes them, the process that starts the job reads one.

The reporting rank has the folder's lock from its first checkpoint on; where another run has it, none is written.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Literal

from hoop.collectives.rank_context import RankContext
from hoop.engine.fault_tolerance.checkpoint_format import verified
from hoop.errors import FailedPrecondition, HoopError, InvalidArgument
from hoop.files import FileLock, make_folder
from hoop.job_events import CheckpointWritten, Emit, JobEvent, SnapshotTaken, Warned
from hoop.runs.checkpoint_store import FOLDER, CheckpointWriter, Snapshot, listed, newest_checkpoint, set_aside, step_of
from hoop.runs.run_recorder import lock_folder

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
        self._lock: FileLock | None = None

    def newest(self) -> bytes | None:
        """The checkpoint to resume from; None: the run begins at step 0. The process that starts the job calls it."""
        if self._out is None:
            return None
        make_folder(self._out / FOLDER, "out")
        lock = lock_folder(self._out)
        try:
            return self._newest(self._out)
        finally:
            lock.release()

    def _newest(self, out: Path) -> bytes | None:
        there = bool(listed(out))
        if not self._resume or (self._resume == "auto" and not there):
            if there:
                raise FailedPrecondition(f"out: {out} holds a run; go on with it by resume=True, or name another")
            return None
        newest = newest_checkpoint(out)
        for warning in newest.warnings:
            log.warning("%s", warning)
        set_aside(out, step_of(newest.path))
        return newest.path.read_bytes()

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
                snapshot = verified(data, event.buffer)
                if self._has_lock(event.steps):
                    writer.offer(Snapshot(event.steps, snapshot.tensors, snapshot.metadata, snapshot.checksums))
            for written in writer.new_events():
                _log(written)

        return emit_and_write

    def _has_lock(self, step: int) -> bool:
        """Whether this process may write the folder. The rank that reported before it had the lock, until its end."""
        if self._lock is None and self._out is not None:
            try:
                self._lock = lock_folder(self._out)
            except HoopError as error:
                log.warning("no checkpoint of step %d: %s; training goes on", step, error)
        return self._lock is not None

    def close(self) -> None:
        """Waits until the last checkpoint is written."""
        if self._writer is not None:
            self._writer.flush(FLUSH_S)
            self._writer.close(FLUSH_S)
            for event in self._writer.new_events():
                _log(event)
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def _log(event: JobEvent) -> None:
    match event:
        case CheckpointWritten():
            log.info("checkpoint after %d steps: %s", event.steps, event.file)
        case Warned():
            log.warning("%s", event.text)
