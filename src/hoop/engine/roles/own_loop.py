"""The role of a rank whose shards a user's own loop computes (``hoop.elastic``)."""

from __future__ import annotations

from hoop.data.structured import to_device
from hoop.engine.custom.feed import StructuredFeed
from hoop.engine.custom.own_loop import Computed, LoopExchange, Shard, Updated
from hoop.engine.custom.state import CustomState
from hoop.engine.executor import PlanExecutor
from hoop.engine.profiler import now
from hoop.engine.roles.custom import CustomRole
from hoop.engine.step_schedule import StepSchedule
from hoop.plan.instructions import Instruction, InstructionKind


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
