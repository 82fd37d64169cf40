"""What a rank is in a job: how it goes on by a few steps, what it tells, and what it gives to a checkpoint.

Role      holds stages and runs its plan's list                    data parallel, pipelines, hybrids
Ring      holds stages and decides by what its neighbours deliver  ring.py
Served    holds a copy of the model; servers keep the weights      served.py
Server    keeps a slice of the weights and of the optimizer        server.py

A rank for which the strategy has no use at the moment: it keeps in step, so that it can take a lost one's place.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from hoop.data.dataset import Indices
from hoop.engine.data_feed import Position
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint import restore, tensors_of
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice
from hoop.engine.job import names_of
from hoop.engine.stage.provenance import Provenance
from hoop.engine.stage.state import LOSS


@dataclass(frozen=True)
class StepWork:
    """A step to be done: where it is in the data, its samples, its learning rate."""

    position: Position
    samples: Indices
    rate: float


class RankRole:
    """A rank that holds stages and runs its plan's list, once a step."""

    stride = 1
    """Steps between two moments at which all ranks are done with everything, and may agree to stop."""

    evidence: Provenance
    """Given by ``testify``, before the first step."""

    def __init__(self, worker: PlanExecutor) -> None:
        self.worker = worker
        for held in worker.held.values():
            held.device = worker.world.device or worker.rank + 1

    def testify(self, evidence: Provenance) -> None:
        """Notes there what updates are made of, where this rank knows the losses."""
        self.evidence = evidence
        for stage, held in self.worker.held.items():
            held.evidence = evidence if stage == self.worker.last else None

    @property
    def reports(self) -> bool:
        """Whether this rank tells the figures: one that knows the loss."""
        return self.worker.plan.holders[-1][0] == self.worker.rank

    @property
    def parts(self) -> int:
        """How many ranks give a part of a checkpoint."""
        return len({ranks[0] for ranks in self.worker.plan.holders})

    @property
    def hears(self) -> bool:
        """Whether the sum of the gradients tells this rank that somebody wants to stop."""
        return self.worker.plan.stages == 1

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        """Does these steps; returns their mean losses where this rank knows them."""
        worker = self.worker
        losses = []
        for work in works:
            worker.rate = work.rate
            worker.step(work.position, work.samples, stop)
            last = worker.held.get(worker.last)
            if last is not None:
                losses.append(float(last.tail[LOSS]) / len(work.samples))
        return losses

    def refresh(self) -> None:
        """Makes copies of weights that are kept elsewhere new; every rank must call it."""

    def tensors(self, model: nn.Module) -> dict[str, Tensor] | None:
        """This rank's part of a checkpoint, or None; every rank must call it, after ``refresh``."""
        worker = self.worker
        holders = enumerate(worker.plan.holders)
        mine = [worker.held[stage] for stage, ranks in holders if ranks[0] == worker.rank]
        return tensors_of(mine, names_of(model)) if mine else None

    def restore(self, model: nn.Module, tensors: Mapping[str, Tensor], done: int) -> None:
        """Goes on from a checkpoint, made after ``done`` steps."""
        restore(list(self.worker.held.values()), model, tensors)

    # ---- for the case that a device is lost (mirrors, recut)

    def state(self, model: nn.Module) -> list[LiveSlice]:
        """What this rank alone can give, or its replicas, so that others can go on: whole tensors, or slices."""
        worker = self.worker
        names = names_of(model)
        found = tensors_of(worker.held.values(), names)
        for stage, held in worker.held.items():
            if not worker.plan.computed_by(worker.rank, stage):  # who computes nothing does not count
                for one in held.layout.counters:
                    del found[names[id(one)]]
        return [LiveSlice(name, 0, one.contiguous().view(-1)) for name, one in found.items()]

    def flats(self) -> list[FlatState]:
        """The weights that are updated here, stage by stage."""
        held = self.worker.held.values()
        return [
            FlatState(one.state_array, one.layout.trained, one.moments, one.total[: one.layout.state])
            for one in held
        ]

    def counters(self) -> list[tuple[Tensor, Tensor]]:
        """What is counted here, and what it will be once the step under way is done."""
        found, plan = [], self.worker.plan
        for stage, held in self.worker.held.items():
            if held.layout.counters and plan.computed_by(self.worker.rank, stage):
                later = {id(one): one + added for one, added in held.counted()}
                found += [(one, later.get(id(one), one)) for one in held.layout.counters]
        return found

    def wanted(self, model: nn.Module) -> dict[str, Tensor]:
        """What ``restore`` needs, as it is now."""
        return tensors_of(self.worker.held.values(), names_of(model))

    @property
    def travels(self) -> bool:
        """Whether nobody else has what this rank has."""
        return not all(len(ranks) > 1 for ranks in self.worker.plan.holders)

    def deadline(self) -> float:
        return time.monotonic() + self.worker.settings.timeout_s


class StandbyRole(RankRole):
    """Holds nothing but its neighbour's mirror."""

    def __init__(self, worker: PlanExecutor, stride: int) -> None:
        super().__init__(worker)
        self.stride = stride

    @property
    def hears(self) -> bool:
        return False

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        self.worker.post.endpoint.flush(self.deadline())  # which notices that a seat is over
        return []
