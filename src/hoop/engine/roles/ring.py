"""A device of the ring: it runs its rule on what its neighbours deliver.

Synchronously a rule spans one step. Asynchronously it spans several, and two of them are under way at a time: each
with samples, numbers and weights of its own.

    micro-batch of the span     0 1 2 3 | 4 5 6 7 | 8 9 …        4 a step
    on links and in memory      0 1 2 3 | 4 5 6 7 | 0 1 …        numbered within two steps
    slots of gradients          a       | b       | a            b = a where a device holds one stage: it adds up a step
                                                                 before the next one's first gradient
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
from hoop.engine.roles.base import RankRole, StepWork
from hoop.engine.roles.parameter_server import SPAN
from hoop.engine.roles.rule_executor import RuleExecutor, due
from hoop.engine.stage.state import LOSS, StateVectors
from hoop.engine.stage.weight_versions import KEPT, WeightVersions
from hoop.errors import InternalError
from hoop.plan.instructions import SENDS, WITH_PEER, Instruction, InstructionKind
from hoop.plan.rules import Rule
from hoop.strategies.base import Strategy

_NOTHING = torch.empty(0)


class RingRole(RankRole):
    """One device of a synchronous ring."""

    def __init__(self, worker: PlanExecutor, strategy: Strategy) -> None:
        super().__init__(worker)
        self._strategy = strategy

    @property
    def hears(self) -> bool:
        return False

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        losses = []
        for work in works:
            self.worker.rate = work.rate
            self.worker.begin(work.position, work.samples)
            self._follow(self._rule(1), 1)
            losses += self._loss(work)
        return losses

    def _rule(self, steps: int) -> Rule:
        rule = self._strategy.rule(self.worker.plan, self.worker.rank, steps)
        assert rule is not None, "a ring is run by rules"
        return rule

    def _follow(self, rule: Rule, steps: int) -> None:
        worker = self.worker
        RuleExecutor(
            rule,
            worker.post,
            due(worker.plan, worker.rank, steps),
            self._execute,
            worker.clock,
            worker.settings.timeout_s,
            named=self._named,
            chooses=True,
        ).run()

    def _loss(self, work: StepWork) -> list[float]:
        last = self.worker.held.get(self.worker.last)
        return [] if last is None else [float(last.tail[LOSS]) / len(work.samples)]

    def _named(self, message: Instruction) -> Instruction:
        return message

    def _execute(self, one: Instruction) -> None:
        """As the worker does it; but for a micro-batch without samples an empty message is sent: rules wait for it."""
        worker = self.worker
        if one.kind not in WITH_PEER or not worker.feed.empty(one.micro):
            worker.do(one)
        elif one.kind in SENDS:
            worker.post.send(one, _NOTHING, self.deadline())
        else:
            worker.post.expect(one, self.deadline())


class AsynchronousRingRole(RingRole):
    """One device of a ring without flushes: weights are one update old, whatever the timing."""

    stride = SPAN

    def __init__(
        self, worker: PlanExecutor, strategy: Strategy, data: Dataset, vectors: StateVectors
    ) -> None:
        super().__init__(worker, strategy)
        plan, settings = worker.plan, worker.settings
        self._micros = plan.micros
        self._window = KEPT * plan.micros
        rows = -(-settings.batch_size // plan.micros)
        later = (LaterFeed(data, settings.seed, rows, turn * plan.micros) for turn in range(1, KEPT))
        self._feeds = [worker.feed, *later]
        self._versions: dict[int, WeightVersions] = {}
        self._totals: dict[int, list[int]] = {}
        for stage, held in worker.held.items():
            each = merge_plan(plan.computed_by(worker.rank, stage), plan.micros)
            shift = each.slots if len(worker.held) > 1 else 0
            held.arrange(_repeated(each, plan.micros, shift))
            (_, slot), *others = each.nodes
            assert not others, "who computes every shard of a stage holds their sum"
            self._totals[stage] = [slot + turn * shift for turn in range(KEPT)]
            self._versions[stage] = WeightVersions(held, vectors, settings.optimizer, f"stage{stage}.")
        worker.handle({InstructionKind.REDUCE: self._reduce, InstructionKind.UPDATE: self._update})
        self._came: Counter[tuple[InstructionKind, int]] = Counter()
        self._updated: Counter[int] = Counter()
        self._steps: list[int] = []
        self._works: Sequence[StepWork] = ()
        self._losses: list[float] = []

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        self._came.clear()
        self._updated.clear()
        self._works, self._losses = works, []
        self._steps = [-1] * KEPT
        self._now = self._rule(len(works))
        self._follow(self._now, len(works))
        for versions in self._versions.values():
            versions.settle()
        return self._losses

    def _named(self, message: Instruction) -> Instruction:
        """With its number in the span: micro-batches come in order."""
        key = message.kind, message.stage
        micro = self._came[key]
        self._came[key] += 1
        if micro % self._window != message.micro:
            raise InternalError(
                f"rank {self.worker.rank}: {message} came where {micro % self._window} was due"
            )
        return message._replace(micro=micro)

    def _execute(self, one: Instruction) -> None:
        if one.micro < 0:
            self.worker.do(one)
            return
        self._enter(one.micro // self._micros)
        if one.kind in (InstructionKind.FORWARD, InstructionKind.BACKWARD):
            version = self._now.version(one.micro)
            assert version is not None, "a ring says which weights"
            self._versions[one.stage].use(version)
        super()._execute(one._replace(micro=one.micro % self._window))

    def _enter(self, step: int) -> None:
        """What follows is of this step."""
        turn = step % KEPT
        self.worker.flow.feed = self._feeds[turn]
        if self._steps[turn] != step:
            self._steps[turn] = step
            self.worker.begin(self._works[step].position, self._works[step].samples)

    def _reduce(self, one: Instruction) -> None:
        held = self.worker.held[one.stage]
        held.total = held.slots[self._totals[one.stage][self._updated[one.stage] % KEPT]]

    def _update(self, one: Instruction) -> None:
        work = self._works[self._updated[one.stage]]
        self._updated[one.stage] += 1
        self._versions[one.stage].update(work.rate, work.position.done)
        if one.stage == self.worker.last:
            self._losses += self._loss(work)


class LaterFeed(DataFeed):
    """A feed whose micro-batches are numbered from ``first`` on."""

    def __init__(self, data: Dataset, seed: int, rows: int, first: int) -> None:
        super().__init__(data, seed, rows)
        self._first = first

    def begin(self, position: Position, samples: Indices, micros: int) -> None:
        super().begin(position, samples, micros)
        self._samples = [*[np.empty(0, np.int64)] * self._first, *self._samples]

    def seed(self, micro: int) -> int:
        return super().seed(micro - self._first)


def _repeated(each: MergePlan, micros: int, shift: int) -> MergePlan:
    """The same for the shards of the next step, in slots further on."""
    order, landings = [], []
    for turn in range(KEPT):
        order += [micro + turn * micros for micro in each.order]
        by = turn * shift
        landings += [
            SlotMerge(one.slot + by, tuple((into + by, other + by) for into, other in one.merges))
            for one in each.landings
        ]
    return MergePlan(tuple(order), tuple(landings), each.nodes, each.slots + (KEPT - 1) * shift)
