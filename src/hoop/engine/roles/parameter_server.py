"""How the weights are cut into slices, one a parameter server.

    | parameters … | buffers … | tail |        a gradient; the weights have no tail
    |  slice 0  |  slice 1  |  slice 2 |       cut at multiples of 64 elements, the tail with the last

Every element is updated by itself, and no kernel has a remainder at a multiple of 64: so a slice's update gives the
same bits as the whole vector's.

A slice of the weights as a server keeps it: weights, optimizer state, and room for gradients, in the arena.

A worker of a parameter server: it gets every slice of the weights, computes its shards, and pushes their gradient.

It holds a copy of the weights and slots for gradients, and neither optimizer state nor a total. The weights land where
the model has them: a server gives them only to who has pushed, and who has pushed does not compute.

A parameter server: it keeps a slice of the weights and of the optimizer's state, and updates it with what it takes.

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

from hoop.collectives.reduction import Array
from hoop.collectives.shard_tree import Leaf, Sum, expression, merge_plan
from hoop.engine.executor import PlanExecutor
from hoop.engine.fault_tolerance.checkpoint import MOMENT, restore, tensors_of
from hoop.engine.fault_tolerance.state_slices import FlatState, LiveSlice
from hoop.engine.job import names_of
from hoop.engine.roles.base import RankRole, StepWork
from hoop.engine.roles.rule_executor import RuleExecutor, due
from hoop.engine.stage.gradient_reduction import clip_scale, squares
from hoop.engine.stage.optimizer import OptimizerSettings, go_on, updating
from hoop.engine.stage.state import LOSS, PAD, TAIL, StateLayout, StateVectors
from hoop.plan.instructions import Instruction, InstructionKind
from hoop.plan.plan import split_evenly
from hoop.strategies.base import Strategy
from hoop.transport.base import PendingSend


@dataclass(frozen=True)
class ServerSlice:
    """Elements ``[low, high)`` of the weights; ``end`` is where its gradient ends."""

    low: int
    high: int
    end: int
    trained: int
    """How many of its elements the optimizer updates; the rest are buffers."""

    @property
    def weights(self) -> int:
        return self.high - self.low

    @property
    def width(self) -> int:
        """Elements of its gradient."""
        return self.end - self.low


def slices(layout: StateLayout, servers: int) -> list[ServerSlice]:
    """One a server; where there are more servers than pieces of 64 elements, the last ones have none."""
    found = []
    for part in split_evenly(layout.state // PAD, servers):
        low, high = part.start * PAD, part.stop * PAD
        found.append(ServerSlice(low, high, high, max(0, min(high, layout.trained) - low)))
    last = found[-1]
    found[-1] = ServerSlice(last.low, last.high, layout.total, last.trained)
    return found


@dataclass(frozen=True)
class ParameterPiece:
    """What of a parameter lies in a slice: elements ``[low, high)`` of the whole vector."""

    parameter: int
    low: int
    high: int
    home: int
    """The slice in which the parameter begins."""


def pieces(layout: StateLayout, parts: list[ServerSlice]) -> list[list[ParameterPiece]]:
    """For each slice the pieces of parameters in it, in order."""
    found: list[list[ParameterPiece]] = [[] for _ in parts]
    for index, parameter in enumerate(layout.parameters):
        start = layout.places[index]
        stop = start + parameter.numel()
        home = next((number for number, one in enumerate(parts) if one.low <= start < one.high), 0)
        for number, one in enumerate(parts):
            low, high = max(start, one.low), min(stop, one.high)
            if low < high:
                found[number].append(ParameterPiece(index, low, high, home))
    return found


class ServerShard:
    """One server's slice."""

    def __init__(
        self,
        vectors: StateVectors,
        layout: StateLayout,
        part: ServerSlice,
        optimizer: OptimizerSettings,
        rows: int,
    ) -> None:
        """``rows``: how many gradients it has room for."""
        self.part = part
        self.weights: Array = vectors.new("slice.weights", part.weights)
        self._trained = torch.from_numpy(self.weights[: part.trained])
        self.moments = [
            torch.from_numpy(vectors.new(f"slice.moment{index}", part.trained))
            for index in range(optimizer.slots)
        ]
        self.rows: Array = vectors.new("slice.gradients", rows * part.width).reshape(rows, part.width)
        self._update = updating(optimizer, self._trained, self.moments)
        self.adopt(layout)

    def adopt(self, layout: StateLayout) -> None:
        """Takes the weights of the model that is here."""
        whole = torch.zeros(layout.state)
        with torch.no_grad():
            for view, tensor in zip(layout.views(whole), layout.tensors, strict=True):
                view.copy_(tensor)
        np.copyto(self.weights, whole[self.part.low : self.part.high].numpy())

    def load_moments(self, wholes: list[Tensor]) -> None:
        for moment, whole in zip(self.moments, wholes, strict=True):
            moment.copy_(whole[self.part.low : self.part.low + self.part.trained])

    def state(self, layout: StateLayout, names: Mapping[int, str]) -> list[LiveSlice]:
        """Weights and optimizer state, as pieces of the tensors that lie in this slice."""
        found = []
        part, vectors = self.part, [torch.from_numpy(self.weights), *self.moments]
        for index, (place, tensor) in enumerate(zip(layout.places, layout.tensors, strict=True)):
            low, high = max(place, part.low), min(place + tensor.numel(), part.high)
            trained = index < len(layout.parameters)
            for number, vector in enumerate(vectors if trained else vectors[:1]):
                prefix = f"{MOMENT}{number - 1}." if number else ""
                if low < high:
                    elements = vector[low - part.low : high - part.low]
                    found.append(LiveSlice(prefix + names[id(tensor)], low - place, elements))
        return found

    def cut(self, row: int, scale: float) -> None:
        """Multiplies the gradient in this row."""
        if scale != 1.0:
            torch.from_numpy(self.rows[row, : self.part.trained]).mul_(scale)

    def apply(self, row: int, rate: float, step: int) -> None:
        """An update with the gradient in this row."""
        go_on(self._update, self.weights, self.part.trained, self.rows[row], rate, step)

    def flat(self, row: int) -> FlatState:
        return FlatState(self.weights, self.part.trained, self.moments, self.rows[row, : self.part.weights])

    def tail(self, row: int) -> Array:
        """What the shards of a gradient measured: in the last slice alone."""
        return self.rows[row, self.part.weights :]


SPAN = 32
"""Steps without a barrier, where the strategy needs none: then all can be told to stop, and the model looked at.

It is what is done again at most when a device is lost.
"""


class ServerClientRole(RankRole):
    """One worker."""

    def __init__(self, worker: PlanExecutor, strategy: Strategy) -> None:
        super().__init__(worker)
        self._strategy = strategy
        self._held = worker.held[0]
        self._parts = slices(self._held.layout, len(worker.plan.servers))
        mine = worker.plan.computed_by(worker.rank, 0)
        self._nodes = [slot for _, slot in merge_plan(mine, worker.plan.micros).nodes]
        self._step, self._got = -1, 0
        self._works: Sequence[StepWork] = ()
        self.stride = 1 if strategy.synchronous else SPAN
        worker.handle({InstructionKind.GET: self._get, InstructionKind.PUSH: self._push})

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

    def flats(self) -> list[FlatState]:
        return []  # the weights are a copy

    def state(self, model: nn.Module) -> list[LiveSlice]:
        """Counters, which every worker that computes has, and no server; and what is not trained."""
        if not self.worker.plan.ranks[self.worker.rank]:
            return []
        names, layout = names_of(model), self._held.layout
        tensors = [*layout.counters, *layout.frozen]
        return [LiveSlice(names[id(one)], 0, one.detach().contiguous().view(-1)) for one in tensors]

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
        worker = self.worker
        rule = self._strategy.rule(worker.plan, worker.rank, len(works))
        if rule is None:
            for work in works:
                worker.step(work.position, work.samples)
            return []
        self._works, self._step, self._got = works, -1, 0
        coming = due(worker.plan, worker.rank, len(works))
        timeout_s = worker.settings.timeout_s
        RuleExecutor(
            rule, worker.post, coming, self._execute, worker.clock, timeout_s, landing=self._landing
        ).run()
        return []

    def _execute(self, one: Instruction) -> None:
        if one.micro >= 0:
            step, micro = divmod(one.micro, self.worker.plan.micros)
            if step != self._step:
                self._step = step
                self.worker.begin(self._works[step].position, self._works[step].samples)
            one = one._replace(micro=micro)
        elif one.kind is InstructionKind.GET:  # a step begins with all slices
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
            self._get(Instruction(InstructionKind.GET, number, peer=server))


@dataclass
class _Whole:
    """All weights and optimizer state, while a checkpoint is read."""

    layout: StateLayout
    moments: list[Tensor]


class ParameterServerRole(RankRole):
    """One server, of one slice."""

    def __init__(
        self, worker: PlanExecutor, strategy: Strategy, blocks: Sequence[nn.Module], vectors: StateVectors
    ) -> None:
        super().__init__(worker)
        plan = worker.plan
        self._strategy = strategy
        self._layout = StateLayout(blocks, plan.micros)
        self._number = plan.servers.index(worker.rank)
        self._last = self._number == len(plan.servers) - 1
        self._parts = slices(self._layout, len(plan.servers))
        self._pieces = pieces(self._layout, self._parts)
        self._busy = [rank for rank in plan.holders[0] if plan.ranks[rank]]
        self._rows, self._merges, self._total = _rows(worker) if strategy.synchronous else ({}, [], 0)
        rows = sum(len(one) for one in self._rows.values()) or 1
        optimizer = worker.settings.optimizer
        self._kept = ServerShard(vectors, self._layout, self._parts[self._number], optimizer, rows)
        self._given: list[PendingSend] = []
        self._pushes: Counter[int] = Counter()
        self._works: Sequence[StepWork] = ()
        self._sums: list[float] = []
        self._updates = 0
        self.stride = 1 if strategy.synchronous else SPAN
        worker.handle(
            {
                InstructionKind.GIVE: self._give,
                InstructionKind.TAKE: self._take,
                InstructionKind.REDUCE: self._add_up,
                InstructionKind.UPDATE: self._update,
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

    def advance(self, works: Sequence[StepWork], stop: bool) -> list[float]:
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
            RuleExecutor(
                rule, worker.post, coming, self._execute, worker.clock, timeout_s, landing=self._landing
            ).run()
        if not self._last:
            return []
        return [total / len(work.samples) for total, work in zip(self._sums, works, strict=True)]

    def _execute(self, one: Instruction) -> None:
        if one.kind is InstructionKind.TAKE:
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
            self._give(Instruction(InstructionKind.GIVE, self._number, peer=rank))
        self._given.clear()
        self.worker.post.endpoint.flush(self.deadline())

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """The optimizer's state of the parameters that begin here; what lies further on comes from the next servers."""
        post, names, servers = self.worker.post, names_of(model), self.worker.plan.servers
        for piece in self._pieces[self._number]:
            if piece.home != self._number:
                for index in range(len(self._kept.moments)):
                    leaving = Instruction(InstructionKind.GIVE, piece.parameter, index, servers[piece.home])
                    post.send(leaving, self._moment(index, piece), self.deadline())
        found = {}
        for piece in self._pieces[self._number]:
            if piece.home == self._number:
                parameter = self._layout.parameters[piece.parameter]
                for index in range(len(self._kept.moments)):
                    elements = [self._moment(index, piece)]
                    for number in range(self._number + 1, len(servers)):
                        if any(other.parameter == piece.parameter for other in self._pieces[number]):
                            coming = Instruction(InstructionKind.GET, piece.parameter, index, servers[number])
                            elements.append(post.expect(coming, self.deadline()))
                    found[f"{MOMENT}{index}.{names[id(parameter)]}"] = torch.cat(elements).view(
                        parameter.shape
                    )
        post.endpoint.flush(self.deadline())
        return found

    def _moment(self, index: int, piece: ParameterPiece) -> Tensor:
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

    def flats(self) -> list[FlatState]:
        return [self._kept.flat(self._total)]

    def state(self, model: nn.Module) -> list[LiveSlice]:
        return self._kept.state(self._layout, names_of(model))

    def wanted(self, model: nn.Module) -> dict[str, Tensor]:
        return tensors_of([self._whole()], names_of(model))

    def _whole(self) -> _Whole:
        return _Whole(self._layout, [torch.zeros(self._layout.trained) for _ in self._kept.moments])


def _rows(worker: PlanExecutor) -> tuple[dict[int, list[int]], list[tuple[int, int]], int]:
    """Where each worker's nodes are put; which rows are added to which, along the tree; where the sum is then."""
    plan = worker.plan
    ranks = plan.holders[0]
    holdings = [merge_plan(plan.computed_by(rank, 0), plan.micros) for rank in ranks]
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
