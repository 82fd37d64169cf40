"""The ring strategy on one rank: a rule decides the next instruction from the messages of the neighbours.

Synchronous: a rule spans one step. Asynchronous: a rule spans ``ASYNC_STRIDE`` steps, and two steps are in flight at a
time, each with its own samples, micro-batch numbers and weight version.

    micro-batch of the rule     0 1 2 3 | 4 5 6 7 | 8 9 …        4 per step
    on links and in memory      0 1 2 3 | 4 5 6 7 | 0 1 …        numbered modulo two steps
    gradient slots              a       | b       | a            b = a if a rank holds one stage: it reduces a step
                                                                 before the first gradient of the next step
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from hoop.collectives.shard_tree import MergePlan, SlotMerge, merge_plan
from hoop.data.dataset import Dataset, Indices
from hoop.engine.data_feed import DataFeed, Position
from hoop.engine.executor import PlanExecutor
from hoop.engine.roles.base import RankRole
from hoop.engine.roles.parameter_server import ASYNC_STRIDE
from hoop.engine.roles.rule_executor import RuleExecutor
from hoop.engine.stage.state import LOSS, StateVectors
from hoop.engine.stage.weight_versions import NUM_VERSIONS, WeightVersions, versions_of
from hoop.engine.step_schedule import StepWork
from hoop.errors import InternalError
from hoop.plan.instructions import SENDS, WITH_PEER, Instruction, InstructionKind
from hoop.plan.rules import Rule
from hoop.strategies.base import Strategy

_EMPTY = torch.empty(0)


class RingRole(RankRole):
    """A rank of a synchronous ring."""

    def __init__(self, executor: PlanExecutor, strategy: Strategy) -> None:
        super().__init__(executor)
        self._strategy = strategy

    @property
    def sees_stop_vote(self) -> bool:
        return False

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        losses = []
        for work in works:
            self.executor.rate = work.rate
            self.executor.begin(work.position, work.samples)
            self._run_rule(self._rule(1), 1)
            losses += self._loss(work)
        return losses

    def _rule(self, steps: int) -> Rule:
        rule = self._strategy.rule(self.executor.plan, self.executor.rank, steps)
        assert rule is not None, "a ring has rules"
        return rule

    def _run_rule(self, rule: Rule, steps: int) -> None:
        RuleExecutor(self.executor, rule, steps, self._execute, renumber=self._renumber, receive_all=True).run()

    def _loss(self, work: StepWork) -> list[float]:
        last = self.executor.stage_states.get(self.executor.last_stage)
        return [] if last is None else [float(last.tail[LOSS]) / len(work.samples)]

    def _renumber(self, message: Instruction) -> Instruction:
        return message

    def _execute(self, instruction: Instruction) -> None:
        """Execute an instruction; for a micro-batch without samples, send an empty message: rules wait for it."""
        executor = self.executor
        if instruction.kind not in WITH_PEER or not executor.feed.empty(instruction.micro):
            executor.execute(instruction)
        elif instruction.kind in SENDS:
            executor.channel.send(instruction, _EMPTY, self.deadline())
        else:
            executor.channel.expect(instruction, self.deadline())


class AsynchronousRingRole(RingRole):
    """A rank of a ring without a flush between steps: weights are always one update old, whatever the timing."""

    stride = ASYNC_STRIDE

    def __init__(self, executor: PlanExecutor, strategy: Strategy, data: Dataset, vectors: StateVectors) -> None:
        super().__init__(executor, strategy)
        plan, settings = executor.plan, executor.settings
        self._num_microbatches = plan.num_microbatches
        self._window = NUM_VERSIONS * plan.num_microbatches
        """Maximum number of micro-batches in flight; micro-batch numbers on links are modulo this."""
        rows = -(-settings.batch_size // plan.num_microbatches)
        more_feeds = (
            LaterFeed(data, settings.seed, rows, lane * plan.num_microbatches) for lane in range(1, NUM_VERSIONS)
        )
        self._feeds = [executor.feed, *more_feeds]
        self._versions: dict[int, WeightVersions] = {}
        self._total_slots: dict[int, list[int]] = {}
        for stage, stage_state in executor.stage_states.items():
            one_step = merge_plan(plan.computed_by(executor.rank, stage), plan.num_microbatches)
            shift = one_step.slots if len(executor.stage_states) > 1 else 0
            stage_state.allocate_slots(_repeat_merge_plan(one_step, plan.num_microbatches, shift))
            (_, slot), *others = one_step.nodes
            assert not others, "a rank that computes all shards of a stage holds their sum in one node"
            self._total_slots[stage] = [slot + lane * shift for lane in range(NUM_VERSIONS)]
            self._versions[stage] = versions_of(stage_state, vectors, settings.optimizer, f"stage{stage}.")
        executor.register_handlers({InstructionKind.REDUCE: self._reduce, InstructionKind.UPDATE: self._update})
        self._received: Counter[tuple[InstructionKind, int]] = Counter()
        self._updates_made: Counter[int] = Counter()
        self._steps_in_flight: list[int] = []
        self._works: Sequence[StepWork] = ()
        self._losses: list[float] = []

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        self._received.clear()
        self._updates_made.clear()
        self._works, self._losses = works, []
        self._steps_in_flight = [-1] * NUM_VERSIONS
        self._current_rule = self._rule(len(works))
        self._run_rule(self._current_rule, len(works))
        for versions in self._versions.values():
            versions.reset()
        return self._losses

    def _renumber(self, message: Instruction) -> Instruction:
        """Give a message its micro-batch number in the rule. Micro-batches arrive in order."""
        key = message.kind, message.stage
        micro = self._received[key]
        self._received[key] += 1
        if micro % self._window != message.micro:
            raise InternalError(
                f"rank {self.executor.rank}: received {message}, expected micro-batch {micro % self._window}"
            )
        return message._replace(micro=micro)

    def _execute(self, instruction: Instruction) -> None:
        if instruction.micro < 0:
            self.executor.execute(instruction)
            return
        self._enter_step(instruction.micro // self._num_microbatches)
        if instruction.kind in (InstructionKind.FORWARD, InstructionKind.BACKWARD):
            version = self._current_rule.weight_version(instruction.micro)
            assert version is not None, "the rule of a ring states the weight version"
            self._versions[instruction.stage].use(version)
        super()._execute(instruction._replace(micro=instruction.micro % self._window))

    def _enter_step(self, step: int) -> None:
        """Select the feed of a step of the rule, for the next instruction; begin the step if it is new."""
        lane = step % NUM_VERSIONS
        self.executor.activations.feed = self._feeds[lane]
        if self._steps_in_flight[lane] != step:
            self._steps_in_flight[lane] = step
            self.executor.begin(self._works[step].position, self._works[step].samples)

    def _reduce(self, instruction: Instruction) -> None:
        slots = self._total_slots[instruction.stage]
        lane = self._updates_made[instruction.stage] % NUM_VERSIONS
        self.executor.stage_states[instruction.stage].select_total(slots[lane])

    def _update(self, instruction: Instruction) -> None:
        work = self._works[self._updates_made[instruction.stage]]
        self._updates_made[instruction.stage] += 1
        self._versions[instruction.stage].update(work.rate, work.position.done)
        if instruction.stage == self.executor.last_stage:
            self._losses += self._loss(work)


class LaterFeed(DataFeed):
    """The feed of the second step in flight: its micro-batches are numbered from ``first`` on."""

    def __init__(self, data: Dataset, seed: int, rows: int, first: int) -> None:
        super().__init__(data, seed, rows)
        self._first = first

    def begin(self, position: Position, samples: Indices, num_microbatches: int) -> None:
        super().begin(position, samples, num_microbatches)
        self._samples = [*[np.empty(0, np.int64)] * self._first, *self._samples]

    def seed(self, micro: int) -> int:
        return super().seed(micro - self._first)


def _repeat_merge_plan(one_step: MergePlan, num_microbatches: int, shift: int) -> MergePlan:
    """Extend the merge plan of a step to all steps in flight: the slots of each are ``shift`` after the previous."""
    order, slot_merges = [], []
    for lane in range(NUM_VERSIONS):
        order += [micro + lane * num_microbatches for micro in one_step.order]
        offset = lane * shift
        slot_merges += [
            SlotMerge(one.slot + offset, tuple((into + offset, other + offset) for into, other in one.merges))
            for one in one_step.slot_merges
        ]
    return MergePlan(tuple(order), tuple(slot_merges), one_step.nodes, one_step.slots + (NUM_VERSIONS - 1) * shift)
