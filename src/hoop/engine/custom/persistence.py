"""Custom training's state in the arena, for a device that is killed and restarted on it (``local_persistence.py``)."""

from __future__ import annotations

from collections.abc import Sequence

from hoop.engine.custom.state import WHOLE_VECTOR, CustomState
from hoop.engine.fault_tolerance.local_persistence import InPlaceState, StepLog
from hoop.engine.fault_tolerance.state_slices import StateShard
from hoop.engine.setup import TrainingSetup
from hoop.engine.stage.state import StateVectors
from hoop.memory.commit_record import CommitRecord
from hoop.plan.instructions import InstructionKind


class CustomInPlaceState(InPlaceState):
    """The commit record of a ``CustomState``: one row, its whole vector."""

    def __init__(
        self,
        setup: TrainingSetup,
        vectors: StateVectors,
        arena_shards: Sequence[StateShard],
        resumed: bool,
        persistent_memory: bool,
    ) -> None:
        self._setup, self.executor, self._arena_shards = setup, setup.executor, arena_shards
        self._untrained = set()
        self._record: CommitRecord | None = None
        state = setup.executor.stage_states[0]
        assert isinstance(state, CustomState)
        self._state = state
        if not persistent_memory:
            return
        words = state.state_array.size
        self._record = vectors.commit_record("state", [(WHOLE_VECTOR, 0, words, 4 * words, "stage0.weights", 0)])
        self._step_log = StepLog(vectors, setup.role.provenance)
        self._update = self.executor.handler(InstructionKind.UPDATE)
        self.executor.register_handlers({InstructionKind.UPDATE: self._update_and_commit})

    def commit(self, step: int) -> int:
        if self._record is not None:
            self.invalidate()
            self._state.pack()
            self._record.step = step
        return step
