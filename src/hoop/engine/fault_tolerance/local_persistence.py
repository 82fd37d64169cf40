"""State in the arena for a device that is killed and restarted on it: the step log, the state, and how both are read.

``StepLog``: the losses of the last steps, which may not have been emitted yet if all devices are killed at once.

    | step | loss (a float64 in two elements) | provenance |        one row per step, a ring buffer;
                                                                   the step is written last

``InPlaceState``: data parallel, where a device has one state, which the update changes in place. A commit record marks
it invalid meanwhile, because a kill may come in the middle of an update:

    record: no step ── update: weights, optimizer state ── copy buffers and counters ── record: this step

Weights and optimizer state change only in an update. Buffers and counters change in every forward, which undoes the
change, so their values after the step are copied to separate vectors. Each step writes the record twice and computes no
checksum: state between the two writes is known to be invalid.

``load_from_arena`` reads, after a restart, what is valid of the run:

    commit records   ``DoubleBufferedState``'s last two states, or ``InPlaceState``'s state: of the step in the record
    snapshots        this rank's checkpoint parts, by their checksums; only these are still valid after a reboot

It copies everything to private memory and frees the arena's buffers, which the new training needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoop.engine.custom.state import WHOLE_VECTOR, CustomState
from hoop.engine.fault_tolerance.checkpoint_format import MOMENT, deserialize
from hoop.engine.fault_tolerance.snapshots import RUN_KEY, SNAPSHOT
from hoop.engine.fault_tolerance.state_slices import (
    LiveSlice,
    StateShard,
    bytes_of,
    shard_of_tensors,
    specs_of,
    state_rows,
)
from hoop.engine.job import names_of
from hoop.engine.setup import TrainingSetup
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import FLOAT32, StateRow, StateVectors
from hoop.errors import FailedPrecondition
from hoop.membership.recovery import NO_STATE, SliceSpec
from hoop.memory import Arena, ArenaBuffer
from hoop.memory.commit_record import NO_STEP, SUFFIX, CommitRecord, commit_records
from hoop.plan.instructions import Instruction, InstructionKind

GPU = "gpu"
"""Key of a commit record that describes state on a GPU: ``gpu_persistence.py`` reads it."""

# ---- the step log

LOG_STEPS = 256
"""Number of rows of the log: more steps than are done between two reports, which are emitted four times a second."""
_NAME = "step_log"
"""Name of the log's buffer in the arena, after the run's prefix."""
_HEADER_ELEMENTS = 3
"""Number of elements of a row before the provenance."""


class StepLog:
    """Ring buffer of the last steps' losses and provenance, written by each rank that knows the losses."""

    def __init__(self, vectors: StateVectors, provenance: Provenance) -> None:
        self._provenance = provenance
        record = vectors.commit_record(_NAME, ())
        self._rows = vectors.new(_NAME, LOG_STEPS * (_HEADER_ELEMENTS + provenance.width)).reshape(LOG_STEPS, -1)
        record.step = 0

    def append(self, done: int, losses: Sequence[float]) -> None:
        """Writes the rows of the last ``len(losses)`` steps up to ``done``; called before the steps are committed."""
        for step, loss in enumerate(losses, start=done - len(losses) + 1):
            row = self._rows[step % LOG_STEPS]
            row[0] = 0
            row[1:_HEADER_ELEMENTS] = np.array([loss]).view(np.float32)
            row[_HEADER_ELEMENTS:] = self._provenance.row(step - 1)
            row[0] = step


def read_step_log(arena: Arena, prefix: str, run: str) -> dict[int, list[float]]:
    """Loss and provenance by step, from the log that the killed process wrote for this run."""
    found: dict[int, list[float]] = {}
    buffers = {one.name: one for one in arena.buffers()}
    for name, _, _ in commit_records(arena, prefix, run):
        buffer = buffers.get(name.removesuffix(SUFFIX))
        if name.endswith(_NAME + SUFFIX) and buffer is not None:
            rows = arena.array(buffer.address, FLOAT32, buffer.size // 4).reshape(LOG_STEPS, -1)
            for row in rows[rows[:, 0] > 0]:
                loss = row[1:_HEADER_ELEMENTS].view(np.float64)
                found[int(row[0])] = [*loss.tolist(), *row[_HEADER_ELEMENTS:].tolist()]
    return found


# ---- reading the state after a restart


def load_from_arena(arena: Arena, prefix: str, run: str) -> list[StateShard]:
    """Valid shards of this run's state, newest first, in private memory. Frees all buffers named ``prefix``…"""
    buffers = {one.name: one for one in arena.buffers() if one.name.startswith(prefix)}
    records = [(step, about) for _, step, about in commit_records(arena, prefix, run) if GPU not in about]
    found = [load_committed(arena, buffers, step, about["rows"]) for step, about in records]
    found += [
        _load_snapshot(arena, one, run) for name, one in buffers.items() if name[len(prefix) :].startswith(SNAPSHOT)
    ]
    for name in buffers:
        arena.free(name)
    shards = [one for one in found if one is not None and one.slices]
    return sorted(shards, key=lambda one: one.step, reverse=True)


def load_committed(
    arena: Arena, buffers: Mapping[str, ArenaBuffer], step: int, rows: Sequence[Sequence[Any]]
) -> StateShard | None:
    """A copy of the slices that a commit record names; None if the arena lacks one. ``rows``: ``StateRow``s as JSON."""
    specs = [SliceSpec(*row[:4]) for row in rows]
    shard = StateShard(specs, np.empty(bytes_of(specs), np.uint8), step)
    for spec, (*_, name, offset) in zip(specs, rows, strict=True):
        if name not in buffers or offset + spec.bytes > buffers[name].size:
            return None
        shard[spec][:] = np.frombuffer(arena.view(buffers[name].address + offset, spec.bytes), np.uint8)
    return shard


def _load_snapshot(arena: Arena, buffer: ArenaBuffer, run: str) -> StateShard | None:
    try:
        tensors, metadata = deserialize(arena.read(buffer.address, buffer.size), buffer.name)
    except FailedPrecondition:
        return None
    return shard_of_tensors(tensors, int(metadata["steps"])) if run and metadata.get(RUN_KEY) == run else None


def tensors_from_shard(
    targets: Mapping[str, Tensor], shard: StateShard, untrained: Collection[str] = ()
) -> dict[str, Tensor] | None:
    """Tensors like ``targets`` with the shard's values; None if the shard lacks one or has another size.

    ``untrained``: names of tensors that keep the value in ``targets`` if the shard lacks them.
    """
    known = {one.name: one for one in shard.slices if not one.low}
    found = {}
    for name, like in targets.items():
        spec = known.get(name)
        if spec is None and name in untrained:
            found[name] = like
            continue
        if spec is None or (spec.elements, spec.bytes) != (like.numel(), like.numel() * like.element_size()):
            return None
        found[name] = torch.from_numpy(shard[spec]).view(like.dtype).view(like.shape)
    return found


def newest_state(
    targets: Mapping[str, Tensor], shards: Sequence[StateShard], untrained: Collection[str] = ()
) -> tuple[int, dict[str, Tensor]] | None:
    """Step and tensors of the first shard that has all ``targets``; see ``tensors_from_shard``."""
    tensors = ((one.step, tensors_from_shard(targets, one, untrained)) for one in shards)
    return next(((step, one) for step, one in tensors if one is not None), None)


# ---- data parallel: the state in place

_STAGE = "stage0."


class InPlaceState:
    """Data parallel: keeps the commit record of this rank's state in step with the state, round every update.

    It replaces the executor's handler of ``UPDATE``. The trainer makes it; recovery calls ``invalidate`` and
    ``commit`` when it overwrites the state otherwise. Without persistent memory every call is a no-op.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        vectors: StateVectors,
        arena_shards: Sequence[StateShard],
        resumed: bool,
        persistent_memory: bool,
    ) -> None:
        """``arena_shards``: what ``load_from_arena`` found. ``persistent_memory``: see ``RankContext``.

        Untrained parameters have the values that the model is made with, so they need no copy; they do if the run was
        ``resumed`` from a checkpoint, or if the arena had copies of them.
        """
        self._setup, self.executor, self._arena_shards = setup, setup.executor, arena_shards
        self._record: CommitRecord | None = None
        self._untrained = self._untrained_names()
        if persistent_memory:
            self._begin_record(vectors, resumed)

    def _begin_record(self, vectors: StateVectors, resumed: bool) -> None:
        """Describe the state in a commit record, which every update then writes."""
        self._record = vectors.commit_record("state", self._place_rows(vectors, resumed))
        self._step_log = StepLog(vectors, self._setup.role.provenance)
        self._update = self.executor.handler(InstructionKind.UPDATE)
        self.executor.register_handlers({InstructionKind.UPDATE: self._update_and_commit})

    def log_steps(self, done: int, losses: Sequence[float]) -> None:
        """Called after steps with their losses; ``done``: steps done. Here each update logs its own."""

    def _untrained_names(self) -> set[str]:
        """Names of the parameters that a state in the arena may lack: those that are not trained."""
        names = names_of(self._setup.model)
        return {names[id(one)] for one in self.executor.stage_states[0].layout.frozen}

    def _place_rows(self, vectors: StateVectors, resumed: bool) -> list[StateRow]:
        """Allocates the copies of what is not in the vectors of the state; returns where each part of the state is."""
        stage, names = self.executor.stage_states[0], names_of(self._setup.model)
        layout = stage.layout
        rows: list[StateRow] = []
        for offset, one in zip(layout.offsets, layout.parameters, strict=False):
            name, size, start = names[id(one)], one.numel(), 4 * offset
            rows.append((name, 0, size, 4 * size, f"{_STAGE}weights", start))
            for index in range(len(stage.moments)):
                moment = f"{MOMENT}{index}.{name}"
                rows.append((moment, 0, size, 4 * size, f"{_STAGE}moment{index}", start))
        trained = len(layout.parameters)
        for offset, buffer in zip(layout.offsets[trained:], layout.buffers, strict=True):
            start, size = 4 * (offset - layout.trained), buffer.numel()
            rows.append((names[id(buffer)], 0, size, 4 * size, "buffers", start))
        self._buffers_copy = vectors.new("buffers", layout.state - layout.trained)
        self._counters = [LiveSlice(names[id(one)], 0, one.view(-1)) for one in layout.counters]
        self._frozen = self._frozen_to_copy(resumed)
        self._counters_copy = allocate_copy(vectors, "counters", self._counters)
        self._frozen_copy = allocate_copy(vectors, "fixed", self._frozen)
        return rows + state_rows(self._counters_copy.slices, "counters") + state_rows(self._frozen_copy.slices, "fixed")

    def _frozen_to_copy(self, resumed: bool) -> list[LiveSlice]:
        """The untrained parameters whose values a restarted device would not have: see ``__init__``."""
        layout, names = self.executor.stage_states[0].layout, names_of(self._setup.model)
        known = {spec.name for shard in self._arena_shards for spec in shard.slices}
        frozen = [LiveSlice(names[id(one)], 0, one.detach().contiguous().view(-1)) for one in layout.frozen]
        return [one for one in frozen if resumed or one.name in known]

    def _update_and_commit(self, instruction: Instruction) -> None:
        self.invalidate()
        self._update(instruction)
        tail = self.executor.stage_states[0].tail
        self._step_log.append(self.executor.steps_updated, [self.executor.stage_states[0].mean_loss(tail)])
        self.commit(self.executor.steps_updated)

    def invalidate(self) -> None:
        """Called before the state is changed: a device that is killed now leaves no valid state."""
        if self._record is not None:
            self._record.step = NO_STEP

    def commit(self, step: int) -> int:
        """Called when the state is that after ``step``, complete; returns ``step``."""
        if self._record is None:
            return step
        self.invalidate()
        stage = self.executor.stage_states[0]
        if self._frozen_copy.step == NO_STEP:
            self._frozen_copy.copy_from(self._frozen, step)
        if self._buffers_copy.size:
            self._buffers_copy[:] = stage.state_array[stage.layout.trained :]
        if self._counters:
            self._counters_copy.copy_from(self._counters, step)
        self._record.step = step
        return step

    def load_newest(self) -> int:
        """Restores the newest state that the arena had; returns its step, or ``NO_STATE``."""
        role, model = self._setup.role, self._setup.model
        found = newest_state(role.restore_targets(model), self._arena_shards, self._untrained)
        if found is None:
            return NO_STATE
        step, tensors = found
        role.restore(model, tensors, step)
        self.executor.steps_updated = step
        return step


class CustomInPlaceState(InPlaceState):
    """Custom training (``engine/custom``): the commit record of a ``CustomState`` has one row, its whole vector."""

    @property
    def _state(self) -> CustomState:
        state = self.executor.stage_states[0]
        assert isinstance(state, CustomState)
        return state

    def _untrained_names(self) -> set[str]:
        return set()

    def _place_rows(self, vectors: StateVectors, resumed: bool) -> list[StateRow]:
        words = self._state.state_array.size
        return [(WHOLE_VECTOR, 0, words, 4 * words, "stage0.weights", 0)]

    def commit(self, step: int) -> int:
        if self._record is not None:
            self.invalidate()
            self._state.pack()
            self._record.step = step
        return step


def allocate_copy(vectors: StateVectors, name: str, state: Sequence[LiveSlice]) -> StateShard:
    """Memory in the arena for copies of these slices: the vector ``name``."""
    specs = specs_of(state)
    count = bytes_of(specs)
    return StateShard(specs, vectors.new(name, count // 4).view("uint8")[:count])
