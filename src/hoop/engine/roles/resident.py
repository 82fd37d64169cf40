"""The role of a data parallel rank whose state stays on a GPU: steps are launched there, ahead of the host.

A stride of steps is run between two synchronisation points. Within it the host prepares steps while the GPU computes
earlier ones, and waits for the GPU only to meet the other ranks. Samples that are on the GPU already need only their
indices, which the host sends for several steps at once; otherwise each step is sent alone:

    host    load 0 | launch 0 | load 1 to 16 | launch 1 | load 17 to 32 | …      read the tails of all steps, once
    GPU            | step 0                  | step 1                   | …

Losses, votes and provenance are in the tails, as on the CPU; they arrive together at the end of the stride.

If a rank is lost, each other rank has finished a number of steps, and no two differ by more than one, because ranks
meet in every step. ``sync_for_recovery`` brings the state and the tails of the finished steps to the host, and recovery
goes on there as on the CPU. Shards of the step under way are computed again.

The kernels that sum the rows of all ranks and update are launched together, so a rank cannot look in between whether
the others have gone on without it and changed their rows (``Endpoint.verify_reads``). It looks when its GPU has
finished them. If another rank has left by then, and the others went on without this one, its state is not used.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.shard_tree import MergePlan, merge_plan
from hoop.data.dataset import Dataset, Indices
from hoop.data.sampler import shard
from hoop.engine.data_feed import microbatch_seed
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint_format import named_tensors
from hoop.engine.job import names_of
from hoop.engine.profiler import InstructionProfiler, now
from hoop.engine.roles.base import RankRole
from hoop.engine.stage.gpu_resident_state import ResidentStageState
from hoop.engine.stage.gpu_resident_step import BatchLoader, RankRows, ResidentStep, StepInputs
from hoop.engine.stage.kept_gpu_memory import MAX_STRIDE
from hoop.engine.stage.peer_row_selection import open_peer_rows
from hoop.engine.stage.peer_rows import SETS, PeerRows
from hoop.engine.stage.provenance import Provenance, mark, sample_fingerprint
from hoop.engine.stage.state import LOSS, MOVE, SAMPLES, STOP, TAIL, StateVectors
from hoop.engine.step_schedule import StepWork
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import Plan

log = logging.getLogger("hoop.engine")
STRIDE_S = 0.25
"""Seconds that a stride should take: as long as a request to stop may wait."""
MAX_SLEEP_S = 2.0
"""Maximum seconds of one sleep for ``extra_slowdown``: a process that was stopped (SIGSTOP) did not compute all the
time."""
LOADED_STEPS = 16
"""Number of steps that are loaded at once, if the samples are on the GPU."""
LOADED_BYTES = 256 << 20
"""Maximum bytes of host memory for the batches of a stride, where the dataset is not resident."""


def stride_for(step_s: float, batch_bytes: int) -> int:
    """The stride for steps of this duration and batches of this size: a power of two."""
    stride = 1
    while stride < MAX_STRIDE and 2 * stride * step_s <= STRIDE_S and 2 * stride * batch_bytes <= LOADED_BYTES:
        stride *= 2
    return stride


class ResidentRole(RankRole):
    """A rank of data parallel training on a GPU."""

    reads_checkpoints_later = True

    def __init__(self, executor: PlanExecutor, data: Dataset, vectors: StateVectors, step_s: float) -> None:
        """``step_s``: estimated seconds of a step, equal at all ranks."""
        super().__init__(executor)
        state = executor.stage_states[0]
        assert isinstance(state, ResidentStageState), "setup.py makes both or none"
        self._state, self._vectors, self._data = state, vectors.child("resident."), data
        settings, accelerator = executor.settings, state.accelerator
        sample_bytes = sum(one.nbytes for one in data.allocate(1))
        self.stride = stride_for(step_s, settings.batch_size * sample_bytes)
        self._inputs = StepInputs(accelerator, state.layout.total - state.layout.state, self.stride)
        self._loader = BatchLoader(data, state, settings.seed, self.stride, settings.batch_size)
        self._upload_stream = torch.cuda.Stream(accelerator.device) if accelerator.cuda else None  # type: ignore[no-untyped-call]
        self._plan: Plan | None = None
        """Plan for which the attributes below are made."""
        self._memory = RankRows(0, MergePlan((), (), (), 0), torch.zeros(0), torch.zeros(0))
        self._steps: dict[int, ResidentStep] = {}
        """The steps that are ready to run, by number of samples in the global batch."""
        self._before_reduce: list[Instruction] = []
        self._compute, self._reduce = (
            Instruction(kind, 0) for kind in (InstructionKind.FORWARD, InstructionKind.REDUCE)
        )
        self._works: Sequence[StepWork] = ()
        self._steps_per_load = LOADED_STEPS if self._loader.resident else 1
        """Number of steps that are loaded at once."""
        self._loaded = 0
        """Number of steps of the stride under way whose load was launched."""
        self._finished = 0
        """Number of steps of the stride under way whose update was launched."""
        self._meetings = 0
        self._noted: set[str] = set()
        """All ``notes`` so far: each is given once."""
        self._updated: torch.cuda.Event | None = None
        """Mark after the last update that was launched; None on an emulated GPU, and before the first."""

    # ---- plans

    def _use_plan(self) -> None:
        """Collective, when the plan or the generation has changed: share memory with the other ranks."""
        executor, state = self.executor, self._state
        if executor.plan is self._plan:
            return
        plan, context, settings = executor.plan, executor.context, executor.settings
        self._drop_steps()
        deadline = time.monotonic() + settings.timeout_s
        shards, ranks = plan.num_microbatches, range(plan.size)
        plans = [merge_plan(plan.computed_by(rank, 0), shards) for rank in ranks]
        mine, count = plans[executor.rank], state.layout.total
        if context.size > 1:
            total = state.accelerator.vector("total", count)
            peers = open_peer_rows(
                context.communicator, plans, shards, state, self._vectors, deadline, settings.timeout_s
            )
            self._memory = RankRows(shards, mine, peers.own, total, peers)
        else:
            rows = state.accelerator.vector("rows", shards * count).view(1, shards, count)
            self._memory = RankRows(shards, mine, rows, rows[0, 0])
        self._before_reduce = [
            one for one in plan.ranks[executor.rank] if one.kind not in (InstructionKind.REDUCE, InstructionKind.UPDATE)
        ]
        self._plan, self._meetings = plan, 0

    def _drop_steps(self) -> None:
        self._state.accelerator.synchronize()
        self._steps.clear()
        if self._memory.peers is not None:
            self._memory.peers.close()
            self._memory = replace(self._memory, peers=None)
        self._plan = None

    def _step_for(self, batch: int) -> ResidentStep:
        """The step for global batches of this size. It is recorded when it is first used."""
        found = self._steps.get(batch)
        if found is None:
            settings, objective = self.executor.settings, self.executor.objective
            assert objective is not None, "custom training is not resident"
            found = ResidentStep(self._state, self._loader, self._inputs, objective, settings, batch, self._memory)
            if settings.graphs:
                began = now()
                found.capture()
                refusal = found.graph_refusal
                log.info(
                    "a step of %d samples %s, after %.2f s",
                    batch,
                    f"runs without a CUDA graph: {refusal}" if refusal else "is recorded as a CUDA graph",
                    now() - began,
                )
                if refusal and self._state.accelerator.cuda:
                    note = f"kernels are launched one by one, which is slower than a CUDA graph: {refusal}"
                    self.notes += [] if note in self._noted else [note]
                    self._noted.add(note)
            self._steps[batch] = found
        return found

    # ---- steps

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        state, executor = self._state, self.executor
        self._use_plan()
        state.upload()
        state.sync_modes()
        self._works, self._finished = works, 0
        self._inputs.begin()
        steps = [self._step_for(len(work.samples)) for work in works]
        if state.commit is not None:
            peers = self._memory.peers
            state.commit.begin_stride(works[0].position.done, trusted=peers is None or not peers.reads_others)
        state.on_device_steps()
        self._loaded, awaited = 0, 0
        self._load(1, stop)
        for index, (work, step) in enumerate(zip(works, steps, strict=True)):
            executor.rate = work.rate
            if index == awaited:
                if self._upload_stream is not None:
                    torch.cuda.current_stream(state.accelerator.device).wait_stream(self._upload_stream)
                awaited = self._loaded
            if self._inputs.exact_rate is not None:
                self._inputs.exact_rate = work.rate
            done = work.position.done
            step.seeds = [microbatch_seed(executor.settings.seed, done, micro) for micro in self._memory.plan.order]
            started = now()
            self._call_hooks(done, self._before_reduce)
            if self._memory.peers is None:
                step.whole()
                if self._loaded == awaited:
                    self._load(self._steps_per_load, stop)
                executor.profiler.record(self._compute, started, now())
            else:
                number = self._meetings % SETS
                step.compute(number)
                if self._loaded == awaited:
                    self._load(self._steps_per_load, stop)
                if state.commit is not None:
                    self._verify_last_update()
                self._meet_and_finish(step, self._memory.peers, number, done, started)
            self._finished += 1
            executor.steps_updated = done + 1
            if executor.extra_slowdown:
                self._slow_down(started)
        self._finish_reads()
        return self._read_tails()

    def _meet_and_finish(self, step: ResidentStep, peers: PeerRows, number: int, done: int, started: float) -> None:
        executor = self.executor
        self._call_hooks(done, [self._reduce])
        self._finish_reads()
        computed = now()
        executor.profiler.record(self._compute, started, computed)
        waited = peers.meet(number, time.monotonic() + executor.settings.timeout_s)
        self._meetings += 1
        self._call_hooks(done, [Instruction(InstructionKind.UPDATE, 0)])
        self.state_is_whole = not peers.reads_others
        step.finish(number)
        self._updated = self._state.accelerator.mark()
        executor.profiler.record(self._reduce, computed, now(), waited)
        executor.extra_bytes_sent += peers.bytes_per_step

    def _finish_reads(self) -> None:
        """Wait for the GPU; raises PeerLost if a rank has left, and this rank's last update may be wrong."""
        self._state.accelerator.synchronize()
        self._verify_last_update()

    def _verify_last_update(self) -> None:
        """Wait for the last update; raises PeerLost if a rank had left while it was made: it may be wrong."""
        if self.state_is_whole:
            return
        if self._updated is not None:
            self._updated.synchronize()
        self.executor.context.communicator.endpoint.verify_reads()
        self.state_is_whole = True
        if self._state.commit is not None:
            self._state.commit.verified(self.executor.steps_updated)

    def _slow_down(self, started: float) -> None:
        """Make the step that began at ``started`` take longer: for experiments and fault injection."""
        self._state.accelerator.synchronize()
        time.sleep(min(self.executor.extra_slowdown * (now() - started), MAX_SLEEP_S))

    def _call_hooks(self, done: int, instructions: Sequence[Instruction]) -> None:
        for hook in self.executor.instruction_hooks:
            for instruction in instructions:
                hook(done + 1, instruction)

    def _load(self, count: int, stop: bool) -> None:
        """Bring samples, learning rate and this rank's tail of the next ``count`` steps of the stride to the GPU."""
        first, works = self._loaded, self._works[self._loaded : self._loaded + count]
        if not works:
            return
        order, shards, device = self._memory.plan.order, self.executor.plan.num_microbatches, self._state.device_id
        move = float(self.executor.context.reassignment_ready())
        steps: list[Indices] = []
        for index, work in enumerate(works, start=first):
            parts = [shard(work.samples, micro, shards) for micro in order]
            steps.append(np.concatenate(parts) if parts else np.zeros(0, np.int64))
            tail = self._inputs.load(index, work.rate, work.position.done)
            tail[:] = 0
            tail[SAMPLES], tail[STOP], tail[MOVE] = len(steps[-1]), float(stop), move
            for micro, part in zip(order, parts, strict=True):
                if len(part):
                    mark(tail[TAIL:], micro % shards, device, sample_fingerprint(part))
        stream: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
        if self._upload_stream is not None:
            stream = torch.cuda.stream(self._upload_stream)
        with stream:
            self._loader.load(first, steps, works[0].position.epoch)
            self._inputs.send(first, first + len(works))
        self._loaded += len(works)

    def _read_tails(self) -> list[float]:
        """Wait for the launched steps, and read their tails; returns the mean losses."""
        state = self._state
        started = now()
        tails = self._inputs.totals[: self._finished].cpu().numpy()
        self.executor.profiler.record(self._compute, started, now())
        works, self._works, self._finished = self._works[: self._finished], (), 0
        for work, tail in zip(works, tails, strict=True):
            self.provenance.record(work.position.done, tail[TAIL:])
        if len(tails):
            state.total = state.total_buffer
            state.tail[:] = tails[-1]
        return [float(tail[LOSS]) / len(work.samples) for work, tail in zip(works, tails, strict=True)]

    # ---- the host's copy

    def sync_for_recovery(self, done: int) -> list[float]:
        losses = self._read_tails()
        self._state.download()
        self._drop_steps()
        return losses

    def on_state_change(self) -> None:
        self._state.on_arena_change()
        self.state_is_whole = True

    def checkpoint_reader(self, model: nn.Module) -> Callable[[], dict[str, Tensor]] | None:
        if self.executor.rank:
            return None
        read, layout, names = self._state.copy_state(), self._state.layout, names_of(model)

        def tensors() -> dict[str, Tensor]:
            found = read()
            return named_tensors(layout, found.tensors, found.counters, found.moments, names)

        return tensors

    def restore(self, model: nn.Module, tensors: Mapping[str, Tensor], done: int) -> None:
        self._state.download()
        super().restore(model, tensors, done)

    # ---- measurements before the first step

    @contextlib.contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Steps inside leave no trace: afterwards the state is that in the arena, and hooks were not called."""
        executor = self.executor
        names = ("instruction_hooks", "profiler", "extra_slowdown", "extra_bytes_sent", "steps_updated", "rate")
        kept = {name: getattr(executor, name) for name in names}
        executor.instruction_hooks, executor.profiler, executor.extra_slowdown = [], InstructionProfiler(), 0.0
        self.provenance = Provenance(executor.plan.num_microbatches)
        commit = self._state.commit
        if commit is not None:
            commit.invalidate()
            commit.enabled = False
        try:
            yield
        finally:
            if commit is not None:
                commit.enabled = True
            for name, value in kept.items():
                setattr(executor, name, value)
            self._state.accelerator.synchronize()
            self._state.discard_device_steps()
            self.state_is_whole = True

    def launches(self, batch: int) -> dict[str, Callable[[], None]]:
        """What a step of ``batch`` samples launches on the GPU, by name. Only in a ``rehearsal``, after a step."""
        step = self._step_for(batch)
        if self._memory.peers is None:
            return {"whole": step.whole}
        return {"compute": partial(step.compute, 0), "finish": partial(step.finish, 0)}

    def begin_stride(self) -> None:
        """At most ``stride`` launches of ``whole`` or ``finish`` may follow."""
        self._inputs.begin()

    def kept_totals(self) -> Tensor:
        """The tails of the totals of the stride under way, (step, element), for a restarted device."""
        return self._inputs.totals

    @property
    def bytes_read(self) -> int:
        """Bytes that the kernels of a step read from other ranks; 0 where ``meet`` brings them."""
        peers = self._memory.peers
        return peers.bytes_per_step if peers is not None and peers.captured else 0

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):  # after a CUDA error every call fails with it
            self._drop_steps()
        self._vectors.free()
