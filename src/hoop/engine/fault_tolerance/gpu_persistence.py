"""The state of a data parallel rank on a GPU, for a device that is killed and restarted on its arena file.

    GPU, in the block of KeptGpuMemory    weights | moments | counters | StateCommit | tails of the stride under way
    arena                                 commit record: where in the block each tensor is, and how to get the block
                                          what does not change: parameters that are not trained, masks
                                          StepLog: losses of the strides whose losses were read

``GpuInPlaceState`` writes the record when training begins; ``load_kept_gpu_state`` reads the state after a restart. The
keeper gives the block away once: it is copied to private memory. Without a keeper (it was killed too, or its time is
over) the state is that of the last replica in host memory, snapshot or checkpoint: see ``local_persistence.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hoop.engine.fault_tolerance.checkpoint_format import MOMENT
from hoop.engine.fault_tolerance.local_persistence import GPU, InPlaceState, StepLog, allocate_copy, load_committed
from hoop.engine.fault_tolerance.state_slices import LiveSlice, StateShard, bytes_of, state_rows
from hoop.engine.job import names_of
from hoop.engine.roles.resident import ResidentRole
from hoop.engine.stage.gpu_resident_state import ResidentStageState
from hoop.engine.stage.gpu_stage import batch_counters
from hoop.engine.stage.kept_gpu_memory import BEGUN, COMMIT_WORDS, ENDED, STRIDE_BEGAN, KeptGpuMemory
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import LOSS, SAMPLES, TAIL, StateVectors
from hoop.errors import HoopError
from hoop.membership.recovery import SliceSpec
from hoop.memory import Arena
from hoop.memory.commit_record import commit_records
from hoop.memory.cuda_arena import CudaArena
from hoop.memory.gpu_driver import CudaGpu, EmulatedGpu
from hoop.memory.gpu_keeper import take_descriptor

log = logging.getLogger("hoop.engine")


class GpuInPlaceState(InPlaceState):
    """Data parallel on a GPU: describes the state there, which the GPU itself commits (``StateCommit``)."""

    _log: StepLog | None = None
    """None: no process keeps the state on the GPU."""

    def _begin_record(self, vectors: StateVectors, resumed: bool) -> None:
        stage, role = self.executor.stage_states[0], self._setup.role
        assert isinstance(stage, ResidentStageState), "setup.py makes both or none"
        assert isinstance(role, ResidentRole), "setup.py makes both or none"
        kept = stage.accelerator.kept
        if stage.commit is None or kept is None:
            return
        self._log = StepLog(vectors, role.provenance)
        names = names_of(self._setup.model)
        counted = {id(one) for one in batch_counters(stage.layout)}
        masks = [LiveSlice(names[id(one)], 0, one.view(-1)) for one in stage.layout.counters if id(one) not in counted]
        self._fixed = [*self._frozen_to_copy(resumed), *masks]
        self._fixed_copy = allocate_copy(vectors, "fixed", self._fixed)
        self._fixed_is_copied = False
        totals = role.kept_totals()
        described = {
            "path": kept.path,
            "bytes": kept.arena.capacity,
            "number": stage.accelerator.device.index if stage.accelerator.cuda else None,
            "tensors": _tensor_rows(stage, kept, names),
            "words": kept.offset(stage.commit.words),
            "totals": [kept.offset(totals), *totals.shape],
            "shards": self.executor.plan.num_microbatches,
        }
        stage.commit.invalidate()
        stage.commit.record = vectors.commit_record(
            "state", state_rows(self._fixed_copy.slices, "fixed"), {GPU: described}
        )

    def log_steps(self, done: int, losses: Sequence[float]) -> None:
        if self._log is not None:
            self._log.append(done, losses)

    def commit(self, step: int) -> int:
        """The state in the arena is complete: its parts that do not change can be copied."""
        if self._log is not None and not self._fixed_is_copied:
            self._fixed_copy.copy_from(self._fixed, 0)
            self._fixed_is_copied = True
        return step


def _tensor_rows(stage: ResidentStageState, kept: KeptGpuMemory, names: Mapping[int, str]) -> list[list[Any]]:
    """Name, elements, bytes and offset in the block of each tensor; its shape, if its elements have another order."""
    layout, rows = stage.layout, []
    trained = len(layout.parameters)
    views = [*stage.device_views(stage.weights), *layout.views(stage.weights)[trained:]]
    named = [(names[id(one)], view) for one, view in zip(layout.tensors, views, strict=True)]
    for index, moment in enumerate(stage.device_moments):
        views = stage.device_views(moment)
        named += [
            (f"{MOMENT}{index}.{names[id(one)]}", view) for one, view in zip(layout.parameters, views, strict=True)
        ]
    for name, view in named:
        shape = None if view.is_contiguous() else list(view.shape)
        rows.append([name, view.numel(), 4 * view.numel(), kept.offset(view), shape])
    for index, one in enumerate(batch_counters(layout)):
        rows.append([names[id(one)], 1, 8, kept.offset(stage.device_counts[index:]), None])
    return rows


@dataclass(frozen=True)
class KeptGpuState:
    """What a restarted device found on its GPU."""

    shard: StateShard
    rows: Mapping[int, list[float]]
    """Loss and provenance of the last steps, by step, as in the step log."""


def load_kept_gpu_state(arena: Arena, prefix: str, run: str) -> KeptGpuState | None:
    """Copy the state that the killed process had on its GPU; None if there is none, or an update was under way.

    Called before ``load_from_arena``, which frees the buffers of the run.
    """
    for _, verified, about in commit_records(arena, prefix, run):
        if GPU not in about:
            continue
        descriptor = take_descriptor(about[GPU]["path"])
        if descriptor is None:
            log.info("the state on the GPU is gone: no process has kept it")
            return None
        try:
            with _mapped(descriptor, about[GPU]) as block:
                return _read(arena, block, about, verified)
        except HoopError as error:
            log.warning("the state on the GPU cannot be read: %s", error)
        finally:
            os.close(descriptor)
    return None


@contextlib.contextmanager
def _mapped(descriptor: int, described: Mapping[str, Any]) -> Any:
    number = described["number"]
    gpu = EmulatedGpu() if number is None else CudaGpu(int(number))
    try:
        block = CudaArena.attach_described(descriptor, int(described["bytes"]), gpu)
        try:
            yield block
        finally:
            block.close()
    finally:
        gpu.close()


def _read(arena: Arena, block: CudaArena, about: Mapping[str, Any], verified: int) -> KeptGpuState | None:
    described = about[GPU]
    words = np.frombuffer(_bytes_at(block, described["words"], 8 * COMMIT_WORDS), np.int64)
    step = int(words[ENDED])
    if step < 0 or words[BEGUN] != step or step > verified:
        log.info("the state on the GPU is not complete: the device was killed in an update")
        return None
    fixed = load_committed(arena, {one.name: one for one in arena.buffers()}, step, about["rows"])
    if fixed is None:
        return None
    rows = described["tensors"]
    specs = [*fixed.slices, *(SliceSpec(name, 0, elements, size) for name, elements, size, _, _ in rows)]
    shard = StateShard(specs, np.empty(bytes_of(specs), np.uint8), step)
    for spec in fixed.slices:
        shard[spec][:] = fixed[spec]
    for spec, (_, _, size, offset, shape) in zip(specs[len(fixed.slices) :], rows, strict=True):
        found = np.frombuffer(_bytes_at(block, offset, size), np.uint8)
        shard[spec][:] = found if shape is None else _in_usual_order(found, shape)
    return KeptGpuState(shard, _step_rows(block, described, int(words[STRIDE_BEGAN]), step))


def _bytes_at(block: CudaArena, offset: int, size: int) -> bytes:
    return block.read(block.at(offset, size), size) if size else b""


def _in_usual_order(found: np.ndarray[tuple[int], np.dtype[np.uint8]], shape: Sequence[int]) -> Any:
    """The bytes of a filter that is stored in channels-last order, in the order of a contiguous tensor."""
    outputs, inputs, height, width = shape
    stored: Tensor = torch.from_numpy(found.copy()).view(torch.float32).view(outputs, height, width, inputs)
    return stored.permute(0, 3, 1, 2).contiguous().view(-1).view(torch.uint8).numpy()


def _step_rows(block: CudaArena, described: Mapping[str, Any], began: int, ended: int) -> dict[int, list[float]]:
    """The losses and provenance of the stride under way, whose losses the host may not have read."""
    offset, steps, width = described["totals"]
    tails = np.frombuffer(_bytes_at(block, offset, 4 * steps * width), np.float32).reshape(steps, width)
    provenance, found = Provenance(described["shards"]), {}
    for step, tail in zip(range(began + 1, ended + 1), tails, strict=False):
        provenance.record(step - 1, tail[TAIL:])
        found[step] = [float(tail[LOSS]) / max(1.0, float(tail[SAMPLES])), *provenance.row(step - 1).tolist()]
    return found
