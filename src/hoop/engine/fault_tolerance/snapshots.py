"""Snapshots: one rank's part of a checkpoint in its arena, where the client reads it while training continues.

The trainer calls ``SnapshotPublisher`` after epochs and at the end. The client (``runs/job_follower.py``) gets the
``snapshot`` events of all ranks, reads their parts, and ``runs/checkpoint_store.py`` writes the file.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import Tensor

from hoop.engine.fault_tolerance.checkpoint_format import copy_into, padded
from hoop.errors import FailedPrecondition, ResourceExhausted, TrainingStateLost
from hoop.job_events import Emit, SnapshotTaken
from hoop.memory import Arena

log = logging.getLogger("hoop.engine")
SNAPSHOT = "snapshot"
"""Prefix of the names of snapshot buffers."""
RUN_KEY = "run"
"""Key of the run id in a snapshot's metadata."""
LATER_BYTES = 4 << 20
"""Size in bytes above which a thread computes a snapshot's checksum, while training goes on."""
WRITE_S = 600.0
"""Seconds that the thread that writes a checkpoint into the arena may take."""
REPLICA_SHARE = 0.02
"""Maximum share of the time in which a copy of a GPU's state is written into the arena."""


def write_to_arena(
    arena: Arena, name: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, Any]
) -> Callable[[], tuple[str, int]]:
    """Does what ``copy_into`` does, into buffer ``name``, which is replaced."""
    if any(buffer.name == name for buffer in arena.buffers()):
        arena.free(name)

    def allocate(size: int) -> memoryview:
        return arena.view(arena.allocate(name, size).address, size)

    return copy_into(allocate, tensors, metadata)


class SnapshotPublisher:
    """Publishes one rank's parts of checkpoints: writes each into the arena and emits a ``snapshot`` event."""

    def __init__(self, arena: Arena, prefix: str, emit: Emit, run: str = "", joined_late: bool = False) -> None:
        """``prefix``: of buffer names. ``run``: run id stored in each snapshot.

        ``joined_late``: this rank joined a running job; checkpoints that it does not know of may exist.
        """
        self._joined_late = joined_late
        self._arena, self._prefix, self._emit, self._run = arena, prefix, emit, run
        self._published = 0
        self._newest: int | None = None
        """Number of steps done at the newest checkpoint; None: there is none."""
        self._pool = ThreadPoolExecutor(1, "hoop-checkpoint")
        self._writing: Future[None] | None = None
        self._next_replica = 0.0
        """Time (``time.monotonic``, in seconds) of the next copy by ``replicate_later``."""

    def publish(
        self,
        tensors: Mapping[str, Tensor] | None,
        done: int,
        steps_per_epoch: int,
        final: bool,
        parts: int,
        reshard_count: int,
        evaluation: Sequence[float] = (),
    ) -> None:
        """Publishes this rank's part of the checkpoint after ``done`` steps; ``tensors`` is None if it has no part.

        A checkpoint has ``parts`` parts, all with the same ``done`` and ``reshard_count``. ``evaluation``: for early
        stopping, the newest one, as ``Evaluation.to_row`` returns it. The tensors may change afterwards; if they are
        large, the event follows later, from another thread.
        """
        self.wait()
        self._newest = done
        if tensors is None:
            return
        emit = self._copy(tensors, done, steps_per_epoch, final, parts, reshard_count, evaluation)
        size = sum(one.nbytes for one in tensors.values())
        if final or size < LATER_BYTES:
            emit()
        else:
            self._writing = self._pool.submit(emit)

    def publish_later(
        self,
        read: Callable[[], Mapping[str, Tensor]] | None,
        done: int,
        steps_per_epoch: int,
        parts: int,
        evaluation: Sequence[float] = (),
    ) -> None:
        """Does what ``publish`` does, for tensors that ``read`` returns in another thread, while the caller goes on.

        An error there is raised by the next call of ``publish``, ``publish_later`` or ``wait``.
        """
        self.wait()
        self._newest = done
        if read is not None:
            self._writing = self._pool.submit(
                lambda: self._copy(read(), done, steps_per_epoch, False, parts, 0, evaluation)()
            )

    def replicate_later(
        self, reader: Callable[[], Callable[[], Mapping[str, Tensor]] | None], done: int, every_s: float
    ) -> None:
        """Copy the state after ``done`` steps into the arena in another thread, if the last copy is old enough.

        For state that is on a GPU: should all devices of a job lose it at once, they go on from this copy when they are
        restarted. A copy replaces the one before, in the buffer that the next checkpoint is written to, and is never
        published.

        ``reader``: see ``RankRole.checkpoint_reader``; it is called only if a copy is due. ``every_s``: least seconds
        from one copy to the next; they take at most ``REPLICA_SHARE`` of the time.
        """
        if time.monotonic() < self._next_replica or (self._writing is not None and not self._writing.done()):
            return
        self.wait()
        self._next_replica = time.monotonic() + every_s
        read = reader()
        if read is not None:
            self._writing = self._pool.submit(lambda: self._write_replica(read, done, every_s))

    def _write_replica(self, read: Callable[[], Mapping[str, Tensor]], done: int, every_s: float) -> None:
        began = time.monotonic()
        buffer = f"{self._prefix}{SNAPSHOT}{self._published % 2}"
        try:
            complete = write_to_arena(self._arena, buffer, read(), padded({"steps": done, RUN_KEY: self._run}))
        except ResourceExhausted as error:
            log.warning("no copy of the GPU's state is kept in the arena between checkpoints: %s", error)
            self._next_replica = math.inf
            return
        complete()
        now = time.monotonic()
        self._next_replica = now + max(every_s, (now - began) / REPLICA_SHARE)

    def wait(self) -> None:
        """Wait until the checkpoint of ``publish_later`` is published; raises what failed there."""
        writing, self._writing = self._writing, None
        if writing is not None:
            try:
                writing.result(WRITE_S)
            except TimeoutError:
                raise FailedPrecondition(
                    f"the checkpoint of step {self._newest} was not copied to the arena within {WRITE_S:g} s; "
                    "is this machine out of memory?"
                ) from None

    def close(self) -> None:
        """Wait as ``wait`` does; what failed does not matter any more."""
        with contextlib.suppress(Exception):
            self.wait()
        self._pool.shutdown(wait=False)

    def _copy(
        self,
        tensors: Mapping[str, Tensor],
        done: int,
        steps_per_epoch: int,
        final: bool,
        parts: int,
        reshard_count: int,
        evaluation: Sequence[float],
    ) -> Callable[[], None]:
        """Copies the tensors into the arena; returns what completes the snapshot and emits its event."""
        epoch, step = divmod(done, steps_per_epoch)
        about: dict[str, Any] = {"steps": done, "epoch": epoch, "step": step, RUN_KEY: self._run}
        if evaluation:
            about["evaluation"] = list(evaluation)
        # Two buffers in turn: the client may read one while the next is written.
        buffer = f"{self._prefix}{SNAPSHOT}{self._published % 2}"
        complete = write_to_arena(self._arena, buffer, tensors, padded(about))
        self._published += 1

        def emit() -> None:
            checksum, size = complete()
            self._emit(SnapshotTaken(done, final, parts, reshard_count, buffer, size, checksum))

        return emit

    def state_lost(self, what: str, found: str = "") -> TrainingStateLost:
        """The error for a run that cannot continue because ``what`` was lost; it tells the user what to do.

        ``found``: what the devices still have.
        """
        return TrainingStateLost(f"{what} was lost: {self.remedy}{f'. Found: {found}' if found else ''}")

    @property
    def remedy(self) -> str:
        """Advice to the user of a run that cannot continue."""
        if self._newest is None and self._joined_late:
            return "go on from its newest checkpoint, if it has one: hoop train --resume --out DIR"
        if self._newest is None:
            return "there is no checkpoint yet, start it again (checkpoint_every says how often one is made)"
        return f"go on from the checkpoint of step {self._newest}: hoop train --resume --out DIR"
