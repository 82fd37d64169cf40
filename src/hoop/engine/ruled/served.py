"""A worker of a parameter server: it gets every slice of the weights, computes its shards, and pushes their gradient.

It holds a copy of the weights and slots for gradients, and neither optimizer state nor a total. The weights land where
the model has them: a server gives them only to who has pushed, and who has pushed does not compute.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.shards import holding
from hoop.engine.job import names_of
from hoop.engine.role import Role, Work
from hoop.engine.ruled.following import Ruled, due
from hoop.engine.ruled.slices import slices
from hoop.engine.survival.parts import Flat, Live
from hoop.engine.worker import Worker
from hoop.plan.instructions import Instruction, Kind
from hoop.strategies.strategy import Strategy

SPAN = 32
"""Steps without a barrier, where the strategy needs none: then all can be told to stop, and the model looked at.

It is what is done again at most when a device is lost.
"""


class Served(Role):
    """One worker."""

    def __init__(self, worker: Worker, strategy: Strategy) -> None:
        super().__init__(worker)
        self._strategy = strategy
        self._held = worker.held[0]
        self._parts = slices(self._held.layout, len(worker.plan.servers))
        mine = worker.plan.computed_by(worker.rank, 0)
        self._nodes = [slot for _, slot in holding(mine, worker.plan.micros).nodes]
        self._step, self._got = -1, 0
        self._works: Sequence[Work] = ()
        self.stride = 1 if strategy.synchronous else SPAN
        worker.handle({Kind.GET: self._get, Kind.PUSH: self._push})

    @property
    def reports(self) -> bool:
        return False

    @property
    def hears(self) -> bool:
        return False

    @property
    def parts(self) -> int:
        return 1 + len(self.worker.plan.servers)

    @property
    def travels(self) -> bool:
        return True

    def flats(self) -> list[Flat]:
        return []  # the weights are a copy

    def state(self, model: nn.Module) -> list[Live]:
        """Counters, which every worker that computes has, and no server; and what is not trained."""
        if not self.worker.plan.ranks[self.worker.rank]:
            return []
        names, layout = names_of(model), self._held.layout
        tensors = [*layout.counters, *layout.frozen]
        return [Live(names[id(one)], 0, one.detach().contiguous().view(-1)) for one in tensors]

    def advance(self, works: Sequence[Work], stop: bool) -> list[float]:
        worker = self.worker
        rule = self._strategy.rule(worker.plan, worker.rank, len(works))
        if rule is None:
            for work in works:
                worker.step(work.position, work.samples)
            return []
        self._works, self._step, self._got = works, -1, 0
        coming = due(worker.plan, worker.rank, len(works))
        timeout_s = worker.settings.timeout_s
        Ruled(rule, worker.post, coming, self._execute, worker.clock, timeout_s, landing=self._landing).run()
        return []

    def _execute(self, one: Instruction) -> None:
        if one.micro >= 0:
            step, micro = divmod(one.micro, self.worker.plan.micros)
            if step != self._step:
                self._step = step
                self.worker.begin(self._works[step].position, self._works[step].samples)
            one = one._replace(micro=micro)
        elif one.kind is Kind.GET:  # a step begins with all slices
            self.worker.at(self._works[self._got // len(self._parts)].position)
            self._got += 1
        self.worker.do(one)

    def _landing(self, message: Instruction) -> Tensor:
        part = self._parts[message.stage]
        return self._held.state[part.low : part.high]

    def _get(self, one: Instruction) -> None:
        self.worker.post.expect(one, self.deadline(), self._landing(one))
        if one.stage == len(self._parts) - 1:
            self._held.begin()  # shards start from the buffers that came

    def _push(self, one: Instruction) -> None:
        held, part = self._held, self._parts[one.stage]
        if not self._strategy.synchronous and one.stage == 0:
            self._add_up()
        nodes = self._nodes if self._strategy.synchronous else self._nodes[:1]
        rows = torch.from_numpy(held.slots)[:, part.low : part.end]
        found = rows[nodes] if len(nodes) > 1 else rows[nodes[0]].unsqueeze(0)
        self.worker.post.send(one, found, self.deadline())
        if one.stage == len(self._parts) - 1:
            self.worker.owed(held.count)

    def _add_up(self) -> None:
        """One gradient of all shards here: where an update is one worker's, nobody else's have a place in its sum."""
        slots = self._held.slots
        first, *others = self._nodes
        for other in others:
            np.add(slots[first], slots[other], out=slots[first])

    def refresh(self) -> None:
        for number, server in enumerate(self.worker.plan.servers):
            self._get(Instruction(Kind.GET, number, peer=server))
