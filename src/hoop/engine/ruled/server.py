"""A parameter server: it keeps a slice of the weights and of the optimizer's state, and updates it with what it takes.

    bsp        gives to all, takes from all, adds the workers' nodes along the fixed tree, updates once:
               data parallel's bits
    asp, ssp   an update for each push, by its rule (strategies/parameter_server.py)

The last slice's gradients have the tail, so the last server knows the losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from hoop.collectives.shards import Leaf, Sum, expression, holding
from hoop.engine.job import names_of
from hoop.engine.role import Role, Work
from hoop.engine.ruled.following import Ruled, due
from hoop.engine.ruled.kept import Kept
from hoop.engine.ruled.served import SPAN
from hoop.engine.ruled.slices import Piece, pieces, slices
from hoop.engine.stages.clipping import clip_scale, squares
from hoop.engine.stages.weights import LOSS, TAIL, Layout, Vectors
from hoop.engine.survival.parts import Flat, Live
from hoop.engine.survival.snapshot import MOMENT, restore, tensors_of
from hoop.engine.worker import Worker
from hoop.plan.instructions import Instruction, Kind
from hoop.strategies.strategy import Strategy
from hoop.transport.base import Pending


@dataclass
class _Whole:
    """All weights and optimizer state, while a checkpoint is read."""

    layout: Layout
    moments: list[Tensor]


class Server(Role):
    """One server, of one slice."""

    def __init__(
        self, worker: Worker, strategy: Strategy, blocks: Sequence[nn.Module], vectors: Vectors
    ) -> None:
        super().__init__(worker)
        plan = worker.plan
        self._strategy = strategy
        self._layout = Layout(blocks, plan.micros)
        self._number = plan.servers.index(worker.rank)
        self._last = self._number == len(plan.servers) - 1
        self._parts = slices(self._layout, len(plan.servers))
        self._pieces = pieces(self._layout, self._parts)
        self._busy = [rank for rank in plan.holders[0] if plan.ranks[rank]]
        self._rows, self._merges, self._total = _rows(worker) if strategy.synchronous else ({}, [], 0)
        rows = sum(len(one) for one in self._rows.values()) or 1
        optimizer = worker.settings.optimizer
        self._kept = Kept(vectors, self._layout, self._parts[self._number], optimizer, rows)
        self._given: list[Pending] = []
        self._pushes: Counter[int] = Counter()
        self._works: Sequence[Work] = ()
        self._sums: list[float] = []
        self._updates = 0
        self.stride = 1 if strategy.synchronous else SPAN
        worker.handle(
            {
                Kind.GIVE: self._give,
                Kind.TAKE: self._take,
                Kind.REDUCE: self._add_up,
                Kind.UPDATE: self._update,
            }
        )

    @property
    def reports(self) -> bool:
        return self._last

    @property
    def hears(self) -> bool:
        return False

    @property
    def parts(self) -> int:
        return 1 + len(self.worker.plan.servers)

    # ---- steps

    def advance(self, works: Sequence[Work], stop: bool) -> list[float]:
        worker = self.worker
        self._works, self._sums = works, [0.0] * len(works)
        self._pushes.clear()
        self.evidence.forget(works[0].position.done)
        self._updates = works[0].position.done * (1 if self._strategy.synchronous else len(self._busy))
        rule = self._strategy.rule(worker.plan, worker.rank, len(works))
        if rule is None:
            for work in works:
                worker.step(work.position, work.samples)
        else:
            coming = due(worker.plan, worker.rank, len(works))
            timeout_s = worker.settings.timeout_s
            Ruled(
                rule, worker.post, coming, self._execute, worker.clock, timeout_s, landing=self._landing
            ).run()
        if not self._last:
            return []
        return [total / len(work.samples) for total, work in zip(self._sums, works, strict=True)]

    def _execute(self, one: Instruction) -> None:
        if one.kind is Kind.TAKE:
            self.worker.at(self._works[self._pushes[one.peer]].position)
        self.worker.do(one)

    def _give(self, one: Instruction) -> None:
        pending = self.worker.post.send(one, torch.from_numpy(self._kept.weights), self.deadline())
        if pending is not None:
            self._given.append(pending)

    def _landing(self, message: Instruction) -> Tensor:
        rows = self._rows.get(message.peer, [0])
        return torch.from_numpy(self._kept.rows[rows[0] : rows[-1] + 1])

    def _take(self, one: Instruction) -> None:
        self.worker.post.expect(one, self.deadline(), self._landing(one))
        self._step = self._pushes[one.peer]
        self._pushes[one.peer] += 1

    def _add_up(self, one: Instruction) -> None:
        rows = self._kept.rows
        for into, other in self._merges:
            np.add(rows[into], rows[other], out=rows[into])

    def _update(self, one: Instruction) -> None:
        for pending in self._given:
            if not pending.done:
                pending.detach()  # who gets these weights gets them as they were
        self._given.clear()
        kept, clip = self._kept, self.worker.settings.optimizer.clip
        scale = clip_scale(squares(self._layout, kept.rows[self._total]), clip) if clip else 1.0
        kept.cut(self._total, scale)
        rate = self._works[self._step].rate
        self.worker.owed(partial(kept.apply, self._total, rate, self._updates), one)
        self._updates += 1
        if self._last:
            tail = kept.tail(self._total)
            self._sums[self._step] += float(tail[LOSS])
            self.evidence.note(self._works[self._step].position.done, tail[TAIL:], more=True)

    # ---- what lasts

    def refresh(self) -> None:
        for rank in self.worker.plan.holders[0]:
            self._give(Instruction(Kind.GIVE, self._number, peer=rank))
        self._given.clear()
        self.worker.post.endpoint.flush(self.deadline())

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The optimizer's state of the parameters that begin here; what lies further on comes from the next servers."""
        post, names, servers = self.worker.post, names_of(model), self.worker.plan.servers
        for piece in self._pieces[self._number]:
            if piece.home != self._number:
                for index in range(len(self._kept.moments)):
                    leaving = Instruction(Kind.GIVE, piece.parameter, index, servers[piece.home])
                    post.send(leaving, self._moment(index, piece), self.deadline())
        found = {}
        for piece in self._pieces[self._number]:
            if piece.home == self._number:
                parameter = self._layout.parameters[piece.parameter]
                for index in range(len(self._kept.moments)):
                    elements = [self._moment(index, piece)]
                    for number in range(self._number + 1, len(servers)):
                        if any(other.parameter == piece.parameter for other in self._pieces[number]):
                            coming = Instruction(Kind.GET, piece.parameter, index, servers[number])
                            elements.append(post.expect(coming, self.deadline()))
                    found[f"{MOMENT}{index}.{names[id(parameter)]}"] = torch.cat(elements).view(
                        parameter.shape
                    )
        post.endpoint.flush(self.deadline())
        return found

    def _moment(self, index: int, piece: Piece) -> Tensor:
        low = self._kept.part.low
        return self._kept.moments[index][piece.low - low : piece.high - low]

    def restore(self, model: nn.Module, tensors: Mapping[str, Tensor], done: int) -> None:
        whole = self._whole()
        restore([whole], model, tensors)
        self._kept.adopt(self._layout)
        self._kept.load_moments(whole.moments)

    # ---- for the case that a device is lost

    @property
    def travels(self) -> bool:
        return True

    def flats(self) -> list[Flat]:
        return [self._kept.flat(self._total)]

    def state(self, model: nn.Module) -> list[Live]:
        return self._kept.state(self._layout, names_of(model))

    def wanted(self, model: nn.Module) -> dict[str, Tensor]:
        return tensors_of([self._whole()], names_of(model))

    def _whole(self) -> _Whole:
        return _Whole(self._layout, [torch.zeros(self._layout.trained) for _ in self._kept.moments])


def _rows(worker: Worker) -> tuple[dict[int, list[int]], list[tuple[int, int]], int]:
    """Where each worker's nodes are put; which rows are added to which, along the tree; where the sum is then."""
    plan = worker.plan
    ranks = plan.holders[0]
    holdings = [holding(plan.computed_by(rank, 0), plan.micros) for rank in ranks]
    rows: dict[int, list[int]] = {}
    places: dict[Leaf, int] = {}
    for index, (rank, one) in enumerate(zip(ranks, holdings, strict=True)):
        for _, slot in one.nodes:
            rows.setdefault(rank, []).append(len(places))
            places[Leaf(index, slot)] = len(places)
    merges: list[tuple[int, int]] = []

    def build(part: Sum) -> int:
        if isinstance(part, Leaf):
            return places[part]
        left, right = build(part[0]), build(part[1])
        merges.append((left, right))
        return left

    total = build(expression(holdings, plan.micros))
    return rows, merges, total
