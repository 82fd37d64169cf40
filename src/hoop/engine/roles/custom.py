"""The roles of a rank of custom training (``engine/custom``).

``CustomRole``: each shard is one call of the user's loss, and a backward. ``OwnLoopRole``: a user's own loop computes
the shards (``hoop.elastic``).

A step is that of data parallel training: the plan's list of shards, an ordered sum, an update. Only the work on a shard
differs, so these roles replace the executor's handlers of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from hoop.data.structured import seed_generators, to_device
from hoop.engine.custom.feed import StructuredFeed
from hoop.engine.custom.own_loop import Computed, LoopExchange, Shard, Updated
from hoop.engine.custom.state import WHOLE_VECTOR, CustomState
from hoop.engine.executor import PlanExecutor
from hoop.engine.profiler import now
from hoop.engine.roles.base import RankRole
from hoop.engine.stage.autograd import CPU, seed_block
from hoop.engine.step_schedule import StepSchedule, StepWork
from hoop.plan.instructions import Instruction, InstructionKind

PREFETCHED_STEPS = 2
"""Number of steps whose batches workers load, the current one included."""


class CustomRole(RankRole):
    """A rank that trains a user's own objects, data parallel."""

    def __init__(
        self, executor: PlanExecutor, state: CustomState, feed: StructuredFeed, schedule: StepSchedule
    ) -> None:
        super().__init__(executor)
        self.state, self._feed, self._schedule = state, feed, schedule
        settings = executor.settings
        self._autocast = settings.precision == "bfloat16"
        executor.register_handlers(
            {
                InstructionKind.LOAD: _nothing,
                InstructionKind.FORWARD: _nothing,
                InstructionKind.BACKWARD: self._compute_shard,
            }
        )

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        executor = self.executor
        plan = executor.plan
        done = works[0].position.done
        prefetched = [
            work
            for step in range(done, min(done + PREFETCHED_STEPS, self._schedule.total_steps))
            for work in self._schedule.next_steps(step, 1)
        ]
        self._feed.prefetch(prefetched, plan.computed_by(executor.rank, 0), plan.num_microbatches)
        return super().advance(works, stop)

    def _compute_shard(self, instruction: Instruction) -> None:
        """Loads a shard's batch, calls the loss, and writes the gradient to the shard's slot."""
        executor, state, micro = self.executor, self.state, instruction.micro
        if self._feed.empty(micro):
            state.on_empty_shard(micro)
            executor.computed.append(micro)
            executor.after_shard(instruction)
            return
        started = now()
        batch = to_device(self._feed.batch(micro), state.device)
        seed = self._feed.seed(micro)
        seed_generators(seed % 2**64)
        if state.device != CPU:
            seed_block(seed, 0, state.device)
        samples = self._feed.rows(micro)
        for one in state.objects.trained:
            one.grad = None
        with torch.autocast(state.device.type, torch.bfloat16, enabled=self._autocast):
            found = state.loss(state.blocks[0], batch, samples)
        found.objective.backward()  # type: ignore[no-untyped-call]
        state.save_buffer_changes()  # after the backward, which may use them
        state.write_gradient(micro, found, self._feed.num_nonempty, self._feed.fingerprints[micro])
        executor.computed.append(micro)
        executor.add_compute_time(started)
        executor.after_shard(instruction)

    def on_evaluated(self, done: int, loss: float) -> None:
        """Passes the loss of the evaluation after ``done`` steps to the scheduler, once for each evaluation."""
        self.state.objects.on_evaluated(done, loss)
        self.state.mark_changed()

    # ---- fault tolerance and checkpoints

    def refresh(self) -> None:
        self.state.pack()

    def on_state_change(self) -> None:
        self.state.unpack()

    def checkpoint_tensors(self, model: nn.Module) -> dict[str, Tensor] | None:
        return self.state.tensors() if self.is_reporter else None

    def restore(self, model: nn.Module, tensors: Mapping[str, Tensor], done: int) -> None:
        if WHOLE_VECTOR in tensors:
            self.state.load_vector(tensors[WHOLE_VECTOR])
        else:
            self.state.load_tensors(tensors)

    def restore_targets(self, model: nn.Module) -> dict[str, Tensor]:
        return {WHOLE_VECTOR: torch.from_numpy(self.state.state_array)}

    def close(self) -> None:
        self._feed.close()


class OwnLoopRole(CustomRole):
    """A rank that hands its shards to the user's thread, and waits for it before the sum."""

    evaluates = False

    def __init__(
        self,
        executor: PlanExecutor,
        state: CustomState,
        feed: StructuredFeed,
        schedule: StepSchedule,
        exchange: LoopExchange,
    ) -> None:
        super().__init__(executor, state, feed, schedule)
        self._exchange = exchange
        self._reduce, self._update = (
            executor.handler(kind) for kind in (InstructionKind.REDUCE, InstructionKind.UPDATE)
        )
        executor.register_handlers(
            {InstructionKind.REDUCE: self._wait_and_reduce, InstructionKind.UPDATE: self._update_and_tell}
        )

    def _compute_shard(self, instruction: Instruction) -> None:
        executor, state, micro = self.executor, self.state, instruction.micro
        if self._feed.empty(micro):
            state.on_empty_shard(micro)
        else:
            started = now()
            batch = to_device(self._feed.batch(micro), state.device)
            for one in state.objects.trained:
                one.grad = None
            shard = Shard(executor.position, micro, batch, self._feed.rows(micro), self._feed.seed(micro))
            found = self._exchange.ask(shard)
            assert found is not None, "a shard is answered with its loss"
            state.save_buffer_changes()
            state.write_gradient(micro, found, self._feed.num_nonempty, self._feed.fingerprints[micro])
            executor.add_compute_time(started)
        executor.computed.append(micro)
        executor.after_shard(instruction)

    def _wait_and_reduce(self, instruction: Instruction) -> None:
        self._exchange.ask(Computed(self.executor.position))
        self._reduce(instruction)

    def _update_and_tell(self, instruction: Instruction) -> None:
        self._update(instruction)
        self._exchange.tell(Updated(self.executor.position, self.state.mean_loss(self.state.tail)))


def _nothing(instruction: Instruction) -> None:
    """The batch is loaded, and the forward run, with the backward."""
