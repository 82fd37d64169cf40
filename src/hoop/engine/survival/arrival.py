"""What a rank tells that comes where others are at work, or where all have to begin again."""

from __future__ import annotations

from typing import Any

from hoop.data.dataset import Splits, described, fingerprint
from hoop.engine.progress_reporter import Emit, ProgressReporter
from hoop.engine.survival.diary import remembered
from hoop.engine.survival.heritage import inherited
from hoop.engine.world import World

MEET_S = 30.0


class Arrival:
    """A rank's coming: it is ready, it has a state from somewhere, and from then on it is one that stays."""

    def __init__(self, joins: bool, emit: Emit, world: World, prefix: str) -> None:
        """``prefix``: of the names of the run's buffers in the arena."""
        self._emit, self._came = emit, joins
        self._rows = remembered(world.arena, prefix, world.run) if joins else {}
        self.left = inherited(world.arena, prefix, world.run) if joins else []
        """What its arena held of the run, the newest first."""
        self.comes = joins
        """It has no state yet, or one that its arena held."""
        self.begins = not joins
        """Whether it is for this rank to tell how the run began: with it, or anew because nobody has stayed."""

    def ready(self, data: Splits, seconds: float) -> None:
        """It can take a seat; which data it has is compared with the others' before it gets one."""
        about = {"data": fingerprint(data), "about": described(data)}
        self._emit({"kind": "ready", "seconds": seconds, **about})

    def there(self, step: int, world: World, source: str, afresh: bool, progress: ProgressReporter) -> None:
        """Every rank is at this step and calls this; ``source``: where this rank has its state from, if it had lost it.

        ``afresh``: no rank has stayed. The rows of the last steps are handed over, from a rank that stayed or, if all
        were restarted, from an arena.
        """
        progress.recall(step, self._rows)
        progress.take_over(world.communicator, step, MEET_S)
        if source:
            self._emit({"kind": "state", "step": step, "device": world.device, "source": source})
        self.comes, self.begins, self._rows = False, self.begins or afresh, {}

    def start(self, told: dict[str, Any], data: Splits) -> None:
        """How the run begins, if nobody has told."""
        if self._came:
            told |= {"costs": None}  # it is predicted once
        if self.begins:
            self._emit({"kind": "started", **told, "data": data.train.checksum, "same": fingerprint(data)})
