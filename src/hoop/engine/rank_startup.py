"""``RankStartup``: how one rank enters a run, at its start or while the run goes on, and the events that report it.

It reads the state and the step log that this device's arena has, and emits ``ready``, ``state`` and ``started``. State
from other ranks comes by ``fault_tolerance/recovery.py`` (``broadcast_state``, ``collect``). The trainer makes one for
each rank, and calls ``complete`` at the end of every recovery.
"""

from __future__ import annotations

from dataclasses import replace

from hoop import job_events as ev
from hoop.collectives.rank_context import RankContext
from hoop.data.dataset import Splits, describe, fingerprint
from hoop.engine.fault_tolerance.gpu_persistence import load_kept_gpu_state
from hoop.engine.fault_tolerance.local_persistence import load_from_arena, read_step_log
from hoop.engine.fault_tolerance.state_slices import StateShard
from hoop.engine.numeric_probe import rank_environment
from hoop.engine.progress_reporter import ProgressReporter
from hoop.job_events import Emit

TAKE_OVER_TIMEOUT_S = 30.0


class RankStartup:
    """One rank's entry into a run, and the state of the run that its arena had."""

    def __init__(self, joining: bool, emit: Emit, context: RankContext, prefix: str) -> None:
        """``prefix``: of the names of the run's buffers in the arena."""
        self._emit, self._joined_late = emit, joining
        self._logged_rows: dict[int, list[float]] = {}
        self.arena_shards: list[StateShard] = []
        """Versions of the run's state that the arena, and memory on a GPU, had, newest first."""
        if joining:
            self._load(context, prefix)
        self.joining = joining
        """True until the first recovery is complete: this rank has no state, or only the arena's."""
        self.has_only_a_part = False
        """True if the arena had only parts of the run's state: the ranks of this job shard the update."""
        self.emits_started = not joining
        """True if this rank must emit ``started``."""

    def _load(self, context: RankContext, prefix: str) -> None:
        """Read what the killed process of this device has left."""
        kept = load_kept_gpu_state(context.arena, prefix, context.run)
        self._logged_rows = read_step_log(context.arena, prefix, context.run)
        self.arena_shards = load_from_arena(context.arena, prefix, context.run)
        if kept is not None:
            self._logged_rows |= kept.rows
            self.arena_shards.append(kept.shard)
            self.arena_shards.sort(key=lambda one: one.step, reverse=True)

    def announce_ready(self, data: Splits, seconds: float) -> None:
        """Emits ``ready``: the coordinator may assign a rank if data and environment equal the other devices'."""
        self._emit(ev.Ready(seconds, fingerprint(data), describe(data), rank_environment()))

    def complete(
        self, step: int, context: RankContext, source: str, all_restarted: bool, progress: ProgressReporter
    ) -> None:
        """Collective. Called at the end of every recovery, when all ranks have the state after ``step``.

        Gives every rank the rows of the last steps, from a survivor, or from an arena if ``all_restarted``.
        ``source``: where this rank's state comes from; empty if it never lost it.
        """
        progress.load_rows(step, self._logged_rows)
        progress.take_over(context.communicator, step, TAKE_OVER_TIMEOUT_S)
        if source:
            self._emit(ev.StateLoaded(step, context.device, source))
        self.emits_started = self.emits_started or all_restarted
        self.joining, self.has_only_a_part, self._logged_rows = False, False, {}

    def emit_started(self, event: ev.Started) -> None:
        """Emits ``Started``, if this rank must."""
        if self._joined_late:
            event = replace(event, costs=None)  # the run is predicted once, when it starts
        if self.emits_started:
            self._emit(event)
